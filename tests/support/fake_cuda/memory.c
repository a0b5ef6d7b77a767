/* Pointers of this process: own and opened device memory, pinned host memory.
 *
 * A device pointer is reserved address space that nobody can read or write; the bytes are mapped elsewhere,
 * where only copies find them.
 */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RANGE_COUNT 8192
#define HANDLE_MAGIC 0x66616b6563756461ull

enum Kind { UNUSED, OWN, OPENED, PINNED, GONE };

struct Range {
    enum Kind kind;
    CUcontext context;
    CUdeviceptr base;
    size_t bytes;
    char *memory;
    uint64_t id;
    int references;
};

static struct Range ranges[RANGE_COUNT];

static struct Range *range_at(CUdeviceptr pointer) {
    for (int at = 0; at < RANGE_COUNT; at++)
        if (ranges[at].kind != UNUSED && pointer - ranges[at].base < ranges[at].bytes)
            return &ranges[at];
    return NULL;
}

static struct Range *unused(void) {
    for (int at = 0; at < RANGE_COUNT; at++)
        if (ranges[at].kind == UNUSED)
            return &ranges[at];
    return NULL;
}

/* For tests: how many pieces of host memory this process has pinned. */
int fake_cuda_pinned_count(void) {
    int count = 0;
    lock();
    for (int at = 0; at < RANGE_COUNT; at++)
        count += ranges[at].kind == PINNED;
    unlock();
    return count;
}

int context_has_memory(CUcontext context) {
    for (int at = 0; at < RANGE_COUNT; at++)
        if (ranges[at].context == context && ranges[at].kind != UNUSED && ranges[at].kind != GONE)
            return 1;
    return 0;
}

/* The addresses stay reserved, so that using them later is seen for what it is. */
static void unmap(struct Range *range) {
    munmap(range->memory, range->bytes);
    range->memory = NULL;
    range->kind = GONE;
}

void forget_memory(void) {
    for (int at = 0; at < RANGE_COUNT; at++) {
        if (ranges[at].kind == OWN)
            ledger_free(ranges[at].id);
        if (ranges[at].kind == OPENED)
            ledger_detach(ranges[at].id);
        if (ranges[at].kind == OWN || ranges[at].kind == OPENED)
            unmap(&ranges[at]);
        if (ranges[at].kind == PINNED)
            memset(&ranges[at], 0, sizeof ranges[at]);
    }
}

char *resolve(CUcontext context, CUdeviceptr pointer, size_t bytes, CUresult *error) {
    struct Range *range = range_at(pointer);
    if (range == NULL || range->kind == PINNED) {
        if (pointer != 0)
            return (char *)pointer;
        *error = violation(CUDA_ERROR_INVALID_VALUE, "a copy to or from nowhere");
        return NULL;
    }
    if (range->kind == GONE)
        *error = violation(CUDA_ERROR_INVALID_VALUE, "use of device memory that was freed or closed");
    else if (range->context != context)
        *error = violation(CUDA_ERROR_INVALID_CONTEXT, "a pointer of another context");
    else if (pointer - range->base + bytes > range->bytes)
        *error = violation(CUDA_ERROR_INVALID_VALUE, "a copy beyond the end of device memory");
    else
        return range->memory + (pointer - range->base);
    return NULL;
}

/* Maps the bytes of an allocation, and reserves the addresses that stand for them. */
static CUresult map(CUcontext context, enum Kind kind, uint64_t id, size_t bytes, CUdeviceptr *pointer) {
    char path[4096];
    ledger_path(id, path, sizeof path);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    struct Range *range = unused();
    if (fd < 0 || range == NULL || (kind == OWN && ftruncate(fd, (off_t)bytes) != 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    close(fd);
    if (memory == MAP_FAILED || base == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (kind == OWN)
        memset(memory, 'J', bytes); /* fresh memory holds anything */
    *range = (struct Range){kind, context, (CUdeviceptr)base, bytes, memory, id, 1};
    *pointer = range->base;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    ENTER(context)
    if (bytes == 0)
        return leave(CUDA_ERROR_INVALID_VALUE);
    uint64_t id = ledger_allocate(context->device, bytes);
    if (id == 0)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    return leave(map(context, OWN, id, bytes, pointer));
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
    ENTER(context)
    struct Range *range = range_at(pointer);
    if (range == NULL || range->kind != OWN || range->base != pointer || range->context != context)
        return leave(violation(CUDA_ERROR_INVALID_VALUE, "free of what is no allocation of this context"));
    if (is_pending(range->base, range->bytes))
        return leave(violation(CUDA_ERROR_INVALID_VALUE, "free of memory that a pending copy uses"));
    if (!ledger_free(range->id))
        return leave(violation(CUDA_ERROR_INVALID_VALUE, "free of memory that another process has open"));
    unmap(range);
    return leave(CUDA_SUCCESS);
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    ENTER(context)
    struct Range *range = range_at(pointer);
    if (range == NULL || range->kind != OWN || range->context != context)
        return leave(violation(CUDA_ERROR_INVALID_VALUE, "a handle of what is no allocation of this context"));
    uint64_t words[4] = {HANDLE_MAGIC, range->id, (uint64_t)context->device, (uint64_t)getpid()};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, words, sizeof words);
    return leave(CUDA_SUCCESS);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags) {
    ENTER(context)
    uint64_t words[4];
    memcpy(words, &handle, sizeof words);
    if (flags != 1 || words[0] != HANDLE_MAGIC) /* CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS */
        return leave(violation(CUDA_ERROR_INVALID_VALUE, "no IPC handle, or wrong flags"));
    if (words[3] == (uint64_t)getpid())
        return leave(violation(CUDA_ERROR_INVALID_CONTEXT, "a handle was opened in the process that exported it"));
    for (int at = 0; at < RANGE_COUNT; at++)
        if (ranges[at].kind == OPENED && ranges[at].id == words[1])
            return leave(violation(CUDA_ERROR_INVALID_VALUE, "a handle was opened twice by one process"));
    uint64_t bytes = ledger_attach(words[1], context->device);
    if (bytes == 0)
        return leave(CUDA_ERROR_INVALID_VALUE);
    return leave(map(context, OPENED, words[1], bytes, pointer));
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    ENTER(context)
    struct Range *range = range_at(pointer);
    if (range == NULL || range->kind != OPENED || range->base != pointer || range->context != context)
        return leave(violation(CUDA_ERROR_INVALID_VALUE, "close of what is not open here"));
    if (is_pending(range->base, range->bytes))
        return leave(violation(CUDA_ERROR_INVALID_VALUE, "close of memory that a pending copy uses"));
    ledger_detach(range->id);
    unmap(range);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    (void)flags;
    ENTER(context)
    CUdeviceptr base = (CUdeviceptr)address;
    struct Range *range = unused();
    for (int at = 0; at < RANGE_COUNT; at++)
        if (ranges[at].kind == PINNED && base < ranges[at].base + ranges[at].bytes &&
            ranges[at].base < base + bytes)
            return leave(violation(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "memory was pinned twice"));
    if (bytes == 0 || base % 4096 != 0 || range == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *range = (struct Range){PINNED, context, base, bytes, (char *)address, 0, 1};
    return leave(CUDA_SUCCESS);
}

CUresult cuMemHostUnregister(void *address) {
    ENTER(context)
    struct Range *range = range_at((CUdeviceptr)address);
    if (range == NULL || range->kind != PINNED || range->base != (CUdeviceptr)address)
        return leave(violation(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "unpinned what is not pinned"));
    if (is_pending(range->base, range->bytes))
        return leave(violation(CUDA_ERROR_INVALID_VALUE, "unpinned memory that a pending copy uses"));
    memset(range, 0, sizeof *range);
    return leave(CUDA_SUCCESS);
}
