#!/bin/bash
# Runs in namespaces of its own, from tests/support/systemd_machine.py: becomes a systemd that knows our unit alone.
# $1: scratch directory, holding units/, prefixd (the command), prefixd.toml, sysusers.conf, tmpfiles.conf
# $2: the Python installation that the command uses, which may lie in a home that the unit may not see
# $3, $4: this repository, and where the unit sees it
set -euo pipefail
scratch=$1
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for folder in etc opt var; do
    mkdir "$scratch/$folder" "$scratch/$folder.work"
    mount -t overlay overlay -o "lowerdir=/$folder,upperdir=$scratch/$folder,workdir=$scratch/$folder.work" "/$folder"
done
mkdir -p /opt/prefixd/bin /opt/python "$4" /etc/prefixd
mount --bind "$2" /opt/python
mount --bind "$3" "$4"
cp "$scratch/prefixd" /opt/prefixd/bin/prefixd
cp "$scratch/prefixd.toml" /etc/prefixd/prefixd.toml
systemd-sysusers "$scratch/sysusers.conf"
systemd-tmpfiles --create --exclude-prefix=/sys "$scratch/tmpfiles.conf"
exec env -i container=other "SYSTEMD_UNIT_PATH=$scratch/units" "PATH=$PATH" /lib/systemd/systemd --system \
    --unit=multi-user.target --show-status=0 --log-target=null
