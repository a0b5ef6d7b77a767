/* What all processes share: devices, who owns and who has opened which memory, and injected faults.
 *
 * One file, mapped by every process and guarded by flock, which the kernel lets go of with its holder. Memory
 * whose owner and openers are all dead is given back whenever anybody looks.
 *
 * The header's layout is known to tests/support/fake_cuda/__init__.py too.
 */
#include "fake_cuda.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define ENTRY_COUNT 4096
#define OPENER_COUNT 16

struct Process { uint64_t pid, started; };

struct Entry {
    uint64_t id; /* 0: unused */
    uint64_t device, bytes;
    struct Process owner; /* pid 0: given up, alive through its openers */
    struct Process openers[OPENER_COUNT];
};

struct Ledger {
    uint64_t device_count;                /* 0 */
    uint64_t capacity[DEVICE_COUNT_MAX];  /* 8 */
    uint64_t lost_mask;                   /* 40: bit d: device d is lost */
    uint64_t hung;                        /* 48: a process, whose operations never complete, and from bit 32 */
                                          /* on a bit for each of its devices that hang */
    uint64_t extra_queries;               /* 56 */
    uint64_t copy_delay_us;               /* 64 */
    uint64_t used[DEVICE_COUNT_MAX];      /* 72: of the last look */
    uint64_t opened_count;                /* 104: how often memory was opened */
    uint64_t last_id;                     /* 112 */
    struct Entry entries[ENTRY_COUNT];
};

static struct Ledger *ledger;
static int ledger_fd = -1;
static struct Process self;
static char directory[3000]; /* of the machine that this process has met first */

/* When a process began, in clock ticks since boot; 0 when it is dead, zombies included. */
static uint64_t start_of(uint64_t pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0)
        return 0;
    text[size] = 0;
    char *field = strrchr(text, ')');
    if (field == NULL || field[2] == 'Z' || field[2] == 'X')
        return 0;
    for (int at = 2; at < 22 && field != NULL; at++)
        field = strchr(field + 1, ' ');
    return field == NULL ? 0 : strtoull(field, NULL, 10);
}

static int is_alive(struct Process *process) {
    if (process->pid == 0)
        return 0;
    if (start_of(process->pid) == process->started)
        return 1;
    process->pid = 0;
    return 0;
}

static int is_open(struct Entry *entry) {
    int open = 0;
    for (int at = 0; at < OPENER_COUNT; at++)
        open += is_alive(&entry->openers[at]);
    return open;
}

/* Gives back what nobody alive owns or has open; sums up the rest. */
static void reap(void) {
    memset(ledger->used, 0, sizeof ledger->used);
    for (int at = 0; at < ENTRY_COUNT; at++) {
        struct Entry *entry = &ledger->entries[at];
        if (entry->id == 0)
            continue;
        if (is_alive(&entry->owner) + is_open(entry) > 0) {
            ledger->used[entry->device] += entry->bytes;
            continue;
        }
        char path[4096];
        ledger_path(entry->id, path, sizeof path);
        unlink(path);
        memset(entry, 0, sizeof *entry);
    }
}

static void ledger_lock(void) {
    while (flock(ledger_fd, LOCK_EX) != 0 && errno == EINTR) {
    }
    reap();
}

static void ledger_unlock(void) { flock(ledger_fd, LOCK_UN); }

CUresult ledger_open(void) {
    char path[4096];
    if (getenv("FAKE_CUDA_DIR") == NULL)
        return CUDA_ERROR_NO_DEVICE;
    snprintf(directory, sizeof directory, "%s", getenv("FAKE_CUDA_DIR"));
    snprintf(path, sizeof path, "%s/ledger", directory);
    ledger_fd = open(path, O_RDWR | O_CLOEXEC);
    if (ledger_fd < 0 || ftruncate(ledger_fd, sizeof *ledger) != 0)
        return CUDA_ERROR_NO_DEVICE;
    ledger = mmap(NULL, sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED, ledger_fd, 0);
    if (ledger == MAP_FAILED)
        return CUDA_ERROR_NO_DEVICE;
    self.pid = (uint64_t)getpid();
    self.started = start_of(self.pid);
    return CUDA_SUCCESS;
}

int ledger_device_count(void) { return (int)ledger->device_count; }
uint64_t ledger_capacity(int device) { return ledger->capacity[device]; }
int ledger_is_lost(int device) { return (int)(ledger->lost_mask >> device & 1); }
int ledger_is_hung(int device) {
    return (ledger->hung & 0xffffffff) == self.pid && (ledger->hung >> 32 >> device & 1);
}
uint64_t ledger_extra_queries(void) { return ledger->extra_queries; }
uint64_t ledger_copy_delay_us(void) { return ledger->copy_delay_us; }

uint64_t ledger_used(int device) {
    ledger_lock();
    uint64_t used = ledger->used[device];
    ledger_unlock();
    return used;
}

void ledger_path(uint64_t id, char *path, size_t size) {
    snprintf(path, size, "%s/memory-%llu", directory, (unsigned long long)id);
}

static struct Entry *find(uint64_t id) {
    for (int at = 0; at < ENTRY_COUNT; at++)
        if (ledger->entries[at].id == id)
            return &ledger->entries[at];
    return NULL;
}

uint64_t ledger_allocate(int device, uint64_t bytes) {
    uint64_t id = 0;
    ledger_lock();
    struct Entry *entry = find(0);
    if (entry != NULL && ledger->used[device] + bytes <= ledger->capacity[device]) {
        id = ++ledger->last_id;
        *entry = (struct Entry){.id = id, .device = (uint64_t)device, .bytes = bytes, .owner = self};
    }
    ledger_unlock();
    return id;
}

int ledger_free(uint64_t id) {
    ledger_lock();
    struct Entry *entry = find(id);
    int free = entry != NULL && !is_open(entry);
    if (free)
        entry->owner.pid = 0;
    reap();
    ledger_unlock();
    return free;
}

uint64_t ledger_attach(uint64_t id, int device) {
    uint64_t bytes = 0;
    ledger_lock();
    struct Entry *entry = id == 0 ? NULL : find(id);
    if (entry != NULL && entry->owner.pid != 0 && entry->device == (uint64_t)device)
        for (int at = 0; at < OPENER_COUNT && bytes == 0; at++)
            if (entry->openers[at].pid == 0) {
                entry->openers[at] = self;
                ledger->opened_count++;
                bytes = entry->bytes;
            }
    ledger_unlock();
    return bytes;
}

void ledger_detach(uint64_t id) {
    ledger_lock();
    struct Entry *entry = find(id);
    for (int at = 0; entry != NULL && at < OPENER_COUNT; at++)
        if (entry->openers[at].pid == self.pid) {
            entry->openers[at].pid = 0;
            break;
        }
    reap();
    ledger_unlock();
}

CUresult violation(CUresult result, const char *format, ...) {
    char path[4096], text[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    snprintf(path, sizeof path, "%s/violations", directory);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd >= 0) {
        dprintf(fd, "pid %d: %s\n", getpid(), text);
        close(fd);
    }
    return result;
}
