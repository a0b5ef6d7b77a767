/* A stand-in for the CUDA driver, strict where the real one is undefined.
 *
 * Device memory is files that processes really share; what a process sees as a device pointer is an address
 * that it cannot touch. Copies happen only while somebody waits for an event or a stream, one operation at a
 * time, so a missing wait always shows as wrong bytes. What it refuses beyond the real driver it also writes
 * down as a violation.
 *
 * driver.c: devices, contexts, the function table. ledger.c: what all processes share. memory.c: pointers,
 * allocations, IPC, pinned memory. streams.c: streams, events, copies.
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct Context *CUcontext;
typedef struct Stream *CUstream;
typedef struct Event *CUevent;
typedef struct { unsigned char bytes[16]; } CUuuid;
typedef struct { unsigned char reserved[64]; } CUipcMemHandle;

/* Results, by the real driver's numbers. */
enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
};

#define DEVICE_COUNT_MAX 4
#define CONTEXT_BYTES (1ull << 20) /* what a context costs on its device */

struct Context {
    int device;
    int references;
    uint64_t ledger_id;
};

/* ---- ledger.c: shared by all processes; every call takes the lock itself ------------------------------ */

CUresult ledger_open(void);
int ledger_device_count(void);
uint64_t ledger_capacity(int device);
uint64_t ledger_used(int device);
int ledger_is_lost(int device);
int ledger_is_hung(int device);       /* this process's operations on it never complete */
uint64_t ledger_extra_queries(void);  /* polls that an event takes beyond its operations */
uint64_t ledger_copy_delay_us(void);
/* Books memory of this process; 0 when the device has no room. */
uint64_t ledger_allocate(int device, uint64_t bytes);
/* Ends this process's ownership; refused (0) while another process has it open. */
int ledger_free(uint64_t id);
/* Another living process's allocation is opened here; its size, or 0. */
uint64_t ledger_attach(uint64_t id, int device);
void ledger_detach(uint64_t id);
void ledger_path(uint64_t id, char *path, size_t size);
/* Says that a rule was broken; returns `result`. */
CUresult violation(CUresult result, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- driver.c -------------------------------------------------------------------------------------- */

void lock(void);
void unlock(void);
/* The calling thread's context; NULL and an error when there is none, or its device is lost. */
CUcontext current(CUresult *error);

/* ---- memory.c: the caller holds the lock ------------------------------------------------------------- */

/* Where `bytes` at `pointer` really lie; NULL and a violation when a rule forbids it. Host memory is itself. */
char *resolve(CUcontext context, CUdeviceptr pointer, size_t bytes, CUresult *error);
int context_has_memory(CUcontext context);
void forget_memory(void);

/* ---- streams.c: the caller holds the lock ------------------------------------------------------------ */

/* Whether a copy that has not happened yet touches this memory. */
int is_pending(CUdeviceptr base, size_t bytes);
int context_has_streams(CUcontext context);
void forget_streams(void);

/* Begin a driver call: lock, and the current context or return the error. */
#define ENTER(context)                                                                                       \
    lock();                                                                                                  \
    CUresult entered = CUDA_SUCCESS;                                                                         \
    CUcontext context = current(&entered);                                                                   \
    if (context == NULL)                                                                                     \
        return leave(entered);
static inline CUresult leave(CUresult result) {
    unlock();
    return result;
}

#endif
