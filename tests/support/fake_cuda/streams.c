/* Streams, events and copies: operations in order, carried out only while somebody waits. */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum Verb { COPY, FILL, RECORD, WAIT };

struct Operation {
    enum Verb verb;
    uint64_t number;
    CUdeviceptr to, from;
    size_t bytes;
    unsigned char value;
    CUevent event;        /* RECORD; NULL once the event is gone */
    CUstream other;       /* WAIT: until this stream has done `until` */
    uint64_t until;
    struct Operation *next;
};

struct Stream {
    CUcontext context;
    int is_gone;
    uint64_t last, done; /* numbers of the last operation given, and of the last carried out */
    struct Operation *first, **end;
    struct Stream *next;
};

struct Event {
    CUcontext context;
    CUstream stream; /* NULL: never recorded */
    uint64_t number;
    uint64_t polls_left;
    int is_gone;
    struct Event *next;
};

static struct Stream *streams; /* never freed: a handle of a stream that is gone is known as such */
static struct Event *events;
static struct Stream defaults[DEVICE_COUNT_MAX];

int is_pending(CUdeviceptr base, size_t bytes) {
    for (struct Stream *stream = streams; stream != NULL; stream = stream->next)
        for (struct Operation *op = stream->first; op != NULL; op = op->next)
            if (op->verb <= FILL && ((op->to < base + bytes && base < op->to + op->bytes) ||
                                     (op->from < base + bytes && base < op->from + op->bytes)))
                return 1;
    return 0;
}

int context_has_streams(CUcontext context) {
    for (struct Stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream->context == context && !stream->is_gone &&
            (stream < defaults || stream >= defaults + DEVICE_COUNT_MAX))
            return 1;
    for (struct Event *event = events; event != NULL; event = event->next)
        if (event->context == context && !event->is_gone)
            return 1;
    return 0;
}

void forget_streams(void) {
    for (struct Stream *stream = streams; stream != NULL; stream = stream->next) {
        stream->is_gone = 1;
        stream->first = NULL;
        stream->end = &stream->first;
        stream->done = stream->last;
    }
    for (struct Event *event = events; event != NULL; event = event->next)
        event->is_gone = 1;
}

static struct Stream *enlist(struct Stream *stream, CUcontext context) {
    stream->context = context;
    stream->end = &stream->first;
    stream->next = streams;
    return streams = stream;
}

/* The stream behind a handle, that of this context; 0 and 1 are the context's default stream. */
static struct Stream *stream_of(CUstream handle, CUcontext context, CUresult *error) {
    if ((uintptr_t)handle <= 1) {
        struct Stream *stream = &defaults[context->device];
        return stream->context == NULL ? enlist(stream, context) : stream;
    }
    for (struct Stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream == handle && !stream->is_gone) {
            if (stream->context == context)
                return stream;
            *error = violation(CUDA_ERROR_INVALID_CONTEXT, "a stream of another context");
            return NULL;
        }
    *error = violation(CUDA_ERROR_INVALID_HANDLE, "use of a stream that is gone");
    return NULL;
}

static struct Event *event_of(CUevent handle, CUcontext context, CUresult *error) {
    for (struct Event *event = events; event != NULL; event = event->next)
        if (event == handle && !event->is_gone) {
            if (event->context == context)
                return event;
            *error = violation(CUDA_ERROR_INVALID_CONTEXT, "an event of another context");
            return NULL;
        }
    *error = violation(CUDA_ERROR_INVALID_HANDLE, "use of an event that is gone");
    return NULL;
}

static void append(struct Stream *stream, struct Operation op) {
    struct Operation *made = malloc(sizeof *made);
    op.number = ++stream->last;
    *made = op;
    *stream->end = made;
    stream->end = &made->next;
}

/* Carries out the stream's first operation, if it may. Whether it did. */
static int step(struct Stream *stream) {
    struct Operation *op = stream->first;
    if (op == NULL || ledger_is_hung(stream->context->device))
        return 0;
    if (op->verb == WAIT && op->other->done < op->until)
        return step(op->other);
    CUresult error = CUDA_SUCCESS;
    if (op->verb <= FILL) {
        char *to = resolve(stream->context, op->to, op->bytes, &error);
        char *from = op->verb == COPY ? resolve(stream->context, op->from, op->bytes, &error) : NULL;
        if (ledger_copy_delay_us())
            usleep((useconds_t)ledger_copy_delay_us());
        if (to != NULL && op->verb == FILL)
            memset(to, op->value, op->bytes);
        else if (to != NULL && from != NULL)
            memmove(to, from, op->bytes);
    }
    stream->done = op->number;
    stream->first = op->next;
    if (stream->first == NULL)
        stream->end = &stream->first;
    free(op);
    return 1;
}

/* Lets the stream get on until `number` is done; gives the lock away meanwhile when nothing moves. */
static CUresult run_until(struct Stream *stream, uint64_t number) {
    while (stream->done < number)
        if (!step(stream)) {
            unlock();
            usleep(1000);
            lock();
            if (ledger_is_lost(stream->context->device))
                return CUDA_ERROR_DEVICE_UNAVAILABLE;
        }
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *made, unsigned flags) {
    (void)flags;
    ENTER(context)
    *made = enlist(calloc(1, sizeof(struct Stream)), context);
    return leave(CUDA_SUCCESS);
}

CUresult cuStreamDestroy_v2(CUstream handle) {
    ENTER(context)
    CUresult error = CUDA_SUCCESS;
    struct Stream *stream = stream_of(handle, context, &error);
    if (stream == NULL)
        return leave(error);
    if (stream->first != NULL && !ledger_is_hung(context->device))
        violation(error, "a stream was destroyed with operations that nobody waited for");
    while (step(stream)) {
    }
    stream->is_gone = 1;
    return leave(CUDA_SUCCESS);
}

CUresult cuStreamQuery(CUstream handle) {
    ENTER(context)
    CUresult error = CUDA_SUCCESS;
    struct Stream *stream = stream_of(handle, context, &error);
    if (stream == NULL)
        return leave(error);
    if (stream->first == NULL)
        return leave(CUDA_SUCCESS);
    step(stream);
    return leave(CUDA_ERROR_NOT_READY);
}

CUresult cuStreamSynchronize(CUstream handle) {
    ENTER(context)
    CUresult error = CUDA_SUCCESS;
    struct Stream *stream = stream_of(handle, context, &error);
    return leave(stream == NULL ? error : run_until(stream, stream->last));
}

CUresult cuEventCreate(CUevent *made, unsigned flags) {
    (void)flags;
    ENTER(context)
    struct Event *event = calloc(1, sizeof *event);
    event->context = context;
    event->next = events;
    *made = events = event;
    return leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent handle) {
    ENTER(context)
    CUresult error = CUDA_SUCCESS;
    struct Event *event = event_of(handle, context, &error);
    if (event == NULL)
        return leave(error);
    event->is_gone = 1;
    return leave(CUDA_SUCCESS);
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    ENTER(context)
    CUresult error = CUDA_SUCCESS;
    struct Event *event = event_of(handle, context, &error);
    struct Stream *stream = event == NULL ? NULL : stream_of(stream_handle, context, &error);
    if (stream == NULL)
        return leave(error);
    append(stream, (struct Operation){.verb = RECORD, .event = event});
    event->stream = stream;
    event->number = stream->last;
    event->polls_left = ledger_extra_queries();
    return leave(CUDA_SUCCESS);
}

CUresult cuEventQuery(CUevent handle) {
    ENTER(context)
    CUresult error = CUDA_SUCCESS;
    struct Event *event = event_of(handle, context, &error);
    if (event == NULL)
        return leave(error);
    if (event->stream == NULL)
        return leave(CUDA_SUCCESS);
    if (event->stream->done < event->number) {
        step(event->stream);
        return leave(CUDA_ERROR_NOT_READY);
    }
    if (event->polls_left > 0) {
        event->polls_left--;
        return leave(CUDA_ERROR_NOT_READY);
    }
    return leave(CUDA_SUCCESS);
}

CUresult cuEventSynchronize(CUevent handle) {
    ENTER(context)
    CUresult error = CUDA_SUCCESS;
    struct Event *event = event_of(handle, context, &error);
    if (event == NULL || event->stream == NULL)
        return leave(error);
    return leave(run_until(event->stream, event->number));
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags) {
    (void)flags;
    ENTER(context)
    CUresult error = CUDA_SUCCESS;
    struct Stream *stream = stream_of(handle, context, &error);
    struct Event *event = stream == NULL ? NULL : event_of(event_handle, context, &error);
    if (event == NULL)
        return leave(error);
    if (event->stream != NULL)
        append(stream, (struct Operation){.verb = WAIT, .other = event->stream, .until = event->number});
    return leave(CUDA_SUCCESS);
}

static CUresult enqueue(CUstream handle, struct Operation op) {
    ENTER(context)
    CUresult error = CUDA_SUCCESS;
    struct Stream *stream = stream_of(handle, context, &error);
    if (stream == NULL || resolve(context, op.to, op.bytes, &error) == NULL ||
        (op.verb == COPY && resolve(context, op.from, op.bytes, &error) == NULL))
        return leave(error);
    append(stream, op);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return enqueue(stream, (struct Operation){.verb = COPY, .to = to, .from = from, .bytes = bytes});
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return cuMemcpyAsync(to, from, bytes, stream);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    return cuMemcpyAsync(to, (CUdeviceptr)from, bytes, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return cuMemcpyAsync((CUdeviceptr)to, from, bytes, stream);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    return enqueue(stream, (struct Operation){.verb = FILL, .to = to, .value = value, .bytes = bytes});
}
