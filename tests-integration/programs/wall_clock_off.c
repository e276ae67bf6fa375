/* SPDX-License-Identifier: Apache-2.0 */
/* Loaded before libc (LD_PRELOAD): the wall clock is off by NVRX_TEST_CLOCK_OFF seconds. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long off(void)
{
    const char *text = getenv("NVRX_TEST_CLOCK_OFF");
    return text ? strtol(text, NULL, 10) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += off();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec spec;
    (void)zone;
    int failed = clock_gettime(CLOCK_REALTIME, &spec);
    if (!failed) {
        now->tv_sec = spec.tv_sec;
        now->tv_usec = spec.tv_nsec / 1000;
    }
    return failed;
}

time_t time(time_t *out)
{
    struct timespec spec;
    if (clock_gettime(CLOCK_REALTIME, &spec))
        return (time_t)-1;
    if (out)
        *out = spec.tv_sec;
    return spec.tv_sec;
}
