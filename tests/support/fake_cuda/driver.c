/* Devices, primary contexts, and the table through which cuda-bindings finds every function. */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STACK_DEPTH 8

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static struct Context contexts[DEVICE_COUNT_MAX];
static int visible[DEVICE_COUNT_MAX], visible_count;
static pid_t initialised_by;
static __thread CUcontext stack[STACK_DEPTH];
static __thread int depth;

void lock(void) { pthread_mutex_lock(&mutex); }
void unlock(void) { pthread_mutex_unlock(&mutex); }

/* A forked child may not use its parent's driver. */
static int is_initialised(void) { return initialised_by != 0 && initialised_by == getpid(); }

CUcontext current(CUresult *error) {
    if (!is_initialised()) {
        *error = CUDA_ERROR_NOT_INITIALIZED;
        return NULL;
    }
    CUcontext context = depth > 0 ? stack[depth - 1] : NULL;
    if (context == NULL || context->references == 0) {
        *error = violation(CUDA_ERROR_INVALID_CONTEXT, "a call without a current context");
        return NULL;
    }
    if (ledger_is_lost(context->device)) {
        *error = CUDA_ERROR_DEVICE_UNAVAILABLE;
        return NULL;
    }
    return context;
}

static CUuuid uuid_of(int device) {
    CUuuid uuid;
    for (int at = 0; at < 16; at++)
        uuid.bytes[at] = (unsigned char)(0xA0 + 16 * device + at);
    return uuid;
}

static int matches_uuid(int device, const char *text) {
    char own[64];
    CUuuid uuid = uuid_of(device);
    const unsigned char *b = uuid.bytes;
    snprintf(own, sizeof own, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
             b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
    return strncmp(own, text, strlen(text)) == 0;
}

/* CUDA_VISIBLE_DEVICES chooses and orders, by index or UUID, up to the first that is none. */
static void choose_devices(void) {
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    int count = ledger_device_count();
    visible_count = 0;
    if (wanted == NULL) {
        for (int device = 0; device < count; device++)
            visible[visible_count++] = device;
        return;
    }
    char *copy = strdup(wanted), *rest = copy;
    for (char *item; (item = strsep(&rest, ",")) != NULL && *item && visible_count < DEVICE_COUNT_MAX;) {
        int found = -1;
        for (int device = 0; device < count; device++)
            if (strncmp(item, "GPU-", 4) == 0 ? matches_uuid(device, item) : atoi(item) == device)
                found = device;
        if (found < 0)
            break;
        visible[visible_count++] = found;
    }
    free(copy);
}

CUresult cuInit(unsigned flags) {
    (void)flags;
    lock();
    if (initialised_by == getpid())
        return leave(CUDA_SUCCESS);
    if (initialised_by != 0)
        return leave(violation(CUDA_ERROR_NOT_INITIALIZED, "a forked child uses its parent's driver"));
    CUresult result = ledger_open();
    if (result == CUDA_SUCCESS) {
        choose_devices();
        initialised_by = getpid();
    }
    return leave(result == CUDA_SUCCESS && visible_count == 0 ? CUDA_ERROR_NO_DEVICE : result);
}

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    if (!is_initialised())
        return CUDA_ERROR_NOT_INITIALIZED;
    *count = visible_count;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (!is_initialised())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= visible_count)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

#define DEVICE(ordinal)                                                                                      \
    if (!is_initialised())                                                                                   \
        return CUDA_ERROR_NOT_INITIALIZED;                                                                   \
    if (ordinal < 0 || ordinal >= visible_count)                                                             \
        return CUDA_ERROR_INVALID_DEVICE;

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    DEVICE(device)
    *uuid = uuid_of(visible[device]);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    DEVICE(device)
    snprintf(name, (size_t)length, "stand-in %d", visible[device]);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    DEVICE(device)
    *bytes = ledger_capacity(visible[device]);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    DEVICE(device)
    int real = visible[device];
    if (ledger_is_lost(real))
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    lock();
    struct Context *found = &contexts[real];
    found->device = real;
    if (found->references == 0 && (found->ledger_id = ledger_allocate(real, CONTEXT_BYTES)) == 0)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    found->references++;
    *context = found;
    return leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    DEVICE(device)
    lock();
    struct Context *found = &contexts[visible[device]];
    if (found->references == 0)
        return leave(violation(CUDA_ERROR_INVALID_CONTEXT, "a context was released more often than retained"));
    if (found->references == 1 && !ledger_is_lost(found->device) &&
        (context_has_memory(found) || context_has_streams(found)))
        return leave(violation(CUDA_ERROR_INVALID_VALUE, "a context was released with memory, streams or events"));
    if (--found->references == 0)
        ledger_free(found->ledger_id);
    return leave(CUDA_SUCCESS);
}

/* For tests: this process is as one that has used nothing yet, and nothing of it is under way. */
void fake_cuda_forget(void) {
    lock();
    forget_streams();
    forget_memory();
    for (int device = 0; device < DEVICE_COUNT_MAX; device++)
        if (contexts[device].references > 0) {
            contexts[device].references = 0;
            ledger_free(contexts[device].ledger_id);
        }
    unlock();
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if (!is_initialised())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (context != NULL && (context < contexts || context >= contexts + DEVICE_COUNT_MAX || !context->references))
        return violation(CUDA_ERROR_INVALID_CONTEXT, "a context that is gone was made current");
    if (depth == 0)
        depth = 1;
    stack[depth - 1] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    if (!is_initialised())
        return CUDA_ERROR_NOT_INITIALIZED;
    *context = depth > 0 ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (depth == STACK_DEPTH)
        return violation(CUDA_ERROR_INVALID_VALUE, "contexts are pushed and not popped");
    depth++;
    stack[depth - 1] = NULL;
    CUresult result = cuCtxSetCurrent(context);
    depth -= result != CUDA_SUCCESS;
    return result;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (depth == 0)
        return violation(CUDA_ERROR_INVALID_CONTEXT, "popped from an empty stack of contexts");
    *context = stack[--depth];
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER(context)
    *total = ledger_capacity(context->device);
    *free_bytes = *total - ledger_used(context->device);
    return leave(CUDA_SUCCESS);
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    switch (error) {
#define NAME(code) case code: *name = #code; return CUDA_SUCCESS;
        NAME(CUDA_SUCCESS) NAME(CUDA_ERROR_INVALID_VALUE) NAME(CUDA_ERROR_OUT_OF_MEMORY)
        NAME(CUDA_ERROR_NOT_INITIALIZED) NAME(CUDA_ERROR_DEVICE_UNAVAILABLE) NAME(CUDA_ERROR_NO_DEVICE)
        NAME(CUDA_ERROR_INVALID_DEVICE) NAME(CUDA_ERROR_INVALID_CONTEXT) NAME(CUDA_ERROR_INVALID_HANDLE)
        NAME(CUDA_ERROR_NOT_FOUND) NAME(CUDA_ERROR_NOT_READY)
        NAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) NAME(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    }
    *name = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

#define DECLARE(name) extern CUresult name();
#define EVERY(X)                                                                                             \
    X(cuMemAlloc_v2) X(cuMemFree_v2) X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle_v2) X(cuIpcCloseMemHandle)    \
    X(cuMemHostRegister_v2) X(cuMemHostUnregister) X(cuStreamCreate) X(cuStreamDestroy_v2) X(cuStreamQuery)  \
    X(cuStreamSynchronize) X(cuStreamWaitEvent) X(cuEventCreate) X(cuEventDestroy_v2) X(cuEventRecord)       \
    X(cuEventQuery) X(cuEventSynchronize) X(cuMemcpyAsync) X(cuMemcpyHtoDAsync_v2) X(cuMemcpyDtoHAsync_v2)   \
    X(cuMemcpyDtoDAsync_v2) X(cuMemsetD8Async) X(cuInit) X(cuDriverGetVersion) X(cuDeviceGetCount)           \
    X(cuDeviceGet) X(cuDeviceGetUuid_v2) X(cuDeviceGetName) X(cuDeviceTotalMem_v2)                           \
    X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease_v2) X(cuCtxSetCurrent) X(cuCtxGetCurrent)        \
    X(cuCtxPushCurrent_v2) X(cuCtxPopCurrent_v2) X(cuMemGetInfo_v2) X(cuGetErrorName)                        \
    X(cuGetProcAddress_v2)
EVERY(DECLARE)

/* The name asked for has no version suffix; the newest is the one that we have. */
static int is_named(const char *own, const char *asked) {
    size_t length = strlen(asked);
    return strncmp(own, asked, length) == 0 && (own[length] == 0 || strcmp(own + length, "_v2") == 0);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
#define ROW(name) {#name, (void *)name},
    static const struct { const char *name; void *function; } table[] = {EVERY(ROW)};
    for (size_t at = 0; at < sizeof table / sizeof *table; at++)
        if (is_named(table[at].name, symbol)) {
            *function = table[at].function;
            if (status != NULL)
                *status = 0;
            return CUDA_SUCCESS;
        }
    *function = NULL;
    if (status != NULL)
        *status = 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    return status == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
