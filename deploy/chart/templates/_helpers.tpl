{{- define "prefixd.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" (.Release.Name | trunc 40) .Chart.Name }}
{{- end }}
{{- end }}

{{- define "prefixd.selector" -}}
app.kubernetes.io/name: prefixd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "prefixd.labels" -}}
{{ include "prefixd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "prefixd.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* The daemon's configuration file. Keys are dotted and no section is opened before extraConfig, so that it can
add to any of them. */}}
{{- define "prefixd.toml" -}}
socket = {{ printf "%s/prefixd.sock" .Values.socketDir | quote }}
socket_group = {{ .Values.socketGroup | quote }}
tenant = {{ .Values.tenant | quote }}
{{- if .Values.dataDir }}
data_dir = {{ .Values.dataDir | quote }}
{{- end }}
probes = "0.0.0.0:{{ .Values.probes.port }}"
{{- if .Values.metrics.enabled }}
metrics = "0.0.0.0:{{ .Values.metrics.port }}"
metrics_exposed = true
{{- end }}
dram.size = "{{ .Values.dram.sizeGiB }}GiB"
dram.huge_pages = {{ .Values.dram.hugePages | quote }}
{{- if .Values.nvme.sizeGiB }}
nvme.size = "{{ .Values.nvme.sizeGiB }}GiB"
{{- end }}
{{- if .Values.gpu.enabled }}
hbm.size = "{{ .Values.gpu.sizeGiB }}GiB"
hbm.device = {{ .Values.gpu.device | quote }}
{{- end }}
drain.timeout_s = {{ .Values.drainTimeoutSeconds }}
{{- with .Values.extraConfig }}

{{ . }}
{{- end }}
{{- range .Values.tenants }}

[[tenants]]
name = {{ .name | quote }}
socket = {{ printf "%s/%s.sock" $.Values.socketDir .name | quote }}
group = {{ .group | quote }}
{{- if .quotaGiB }}
quota = "{{ .quotaGiB }}GiB"
{{- end }}
{{- if .admin }}
admin = true
{{- end }}
{{- end }}
{{- end }}
