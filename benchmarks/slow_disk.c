/* A disk that waits before each read of one file: to be loaded before the C library (LD_PRELOAD). */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static _Atomic ino_t slow_file;
static _Atomic long delay_ns, slept_ns;

/* Reads of `path` wait `delay_s` from now on. */
void slow_disk(const char *path, double delay_s) {
    struct stat known;
    if (stat(path, &known) == 0) {
        delay_ns = (long)(delay_s * 1e9);
        slow_file = known.st_ino;
    }
}

/* How long they have waited so far. */
double slow_disk_slept_s(void) { return slept_ns * 1e-9; }

static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static void wait_for_disk(int file, off_t offset) {
    struct stat read;
    if (!slow_file || fstat(file, &read) != 0 || read.st_ino != slow_file) return;
    if (offset >= read.st_size) return; /* there is nothing to read */
    long began_ns = now_ns();
    struct timespec delay = {delay_ns / 1000000000L, delay_ns % 1000000000L};
    nanosleep(&delay, NULL);
    slept_ns += now_ns() - began_ns;
}

ssize_t pread(int file, void *into, size_t size, off_t offset) {
    static ssize_t (*original)(int, void *, size_t, off_t);
    if (!original) original = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    wait_for_disk(file, offset);
    return original(file, into, size, offset);
}

ssize_t pread64(int file, void *into, size_t size, off64_t offset) {
    return pread(file, into, size, offset);
}
