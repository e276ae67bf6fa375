/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for libnvidia-ml.so.1: it answers what a control file says, read anew at each call.

   The file is named by FAKE_NVML_CONTROL; each line is "key value". Every call is written to
   FAKE_NVML_CALLS as "pid function". Keys:
     return.FUNCTION N         the function returns N
     delay_ms.FUNCTION N       it takes that long first
     hang.FUNCTION 1           it does not return while this line is there
     count N                   number of GPUs
     driver TEXT, name TEXT    version and product
     gone.GPU N                getting the handle returns N
     uuid.GPU TEXT, mig.GPU.N TEXT, bus.GPU TEXT
     memory.GPU.total N        (also used, free, reserved) bytes
     field.GPU.ID[.SCOPE] N    value of a field; without a line it is not supported
     fielderror.GPU.ID N       its own return code
     link.GPU.LINK N           state; without a line an invalid argument
     counter.GPU.LINK.ID N     error counter; without a line it is not supported
*/
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int gpu; int mig; } device;
static device devices[64][8];

static int find(const char *key, char *value, size_t size)
{
    const char *path = getenv("FAKE_NVML_CONTROL");
    FILE *file = path ? fopen(path, "re") : NULL;
    char line[512];
    int found = 0;
    size_t length = strlen(key);
    if (!file)
        return 0;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, key, length) && line[length] == ' ') {
            snprintf(value, size, "%s", line + length + 1);
            found = 1;
        }
    }
    fclose(file);
    return found;
}

static int number(const char *key, long long *value)
{
    char text[256];
    if (!find(key, text, sizeof text))
        return 0;
    *value = atoll(text);
    return 1;
}

static int enter(const char *function)
{
    char key[160];
    long long value;
    const char *path = getenv("FAKE_NVML_CALLS");
    FILE *file = path ? fopen(path, "ae") : NULL;
    if (file) {
        fprintf(file, "%d %s\n", (int)getpid(), function);
        fclose(file);
    }
    snprintf(key, sizeof key, "delay_ms.%s", function);
    if (number(key, &value))
        usleep((useconds_t)(value * 1000));
    snprintf(key, sizeof key, "hang.%s", function);
    while (number(key, &value))
        usleep(10000);
    snprintf(key, sizeof key, "return.%s", function);
    return number(key, &value) ? (int)value : 0;
}

#define ENTER(name) do { int code_ = enter(name); if (code_) return code_; } while (0)

int nvmlInitWithFlags(unsigned flags) { (void)flags; ENTER("nvmlInit"); return 0; }
int nvmlShutdown(void) { ENTER("nvmlShutdown"); return 0; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake driver"; }

static int copy(const char *key, const char *fallback, char *out, unsigned size)
{
    char text[256];
    snprintf(out, size, "%s", find(key, text, sizeof text) ? text : fallback);
    return 0;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size)
{
    ENTER("nvmlSystemGetDriverVersion");
    return copy("driver", "570.86.10", out, size);
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    long long value = 0;
    ENTER("nvmlDeviceGetCount");
    number("count", &value);
    *count = (unsigned)value;
    return 0;
}

static int handle(int gpu, int mig, device **out)
{
    char key[64];
    long long value;
    snprintf(key, sizeof key, "gone.%d", gpu);
    if (number(key, &value))
        return (int)value;
    devices[gpu][mig].gpu = gpu;
    devices[gpu][mig].mig = mig;
    *out = &devices[gpu][mig];
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned gpu, device **out)
{
    long long count = 0;
    ENTER("nvmlDeviceGetHandleByIndex");
    number("count", &count);
    if (gpu >= count || gpu >= 64)
        return 2;
    return handle((int)gpu, 0, out);
}

static void uuid_of(int gpu, int mig, char *out, unsigned size)
{
    char key[64], fallback[64];
    if (mig) {
        snprintf(key, sizeof key, "mig.%d.%d", gpu, mig - 1);
        snprintf(fallback, sizeof fallback, "MIG-none");
    } else {
        snprintf(key, sizeof key, "uuid.%d", gpu);
        snprintf(fallback, sizeof fallback, "GPU-%08d-0000-0000-0000-000000000000", gpu);
    }
    copy(key, fallback, out, size);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device **out)
{
    long long count = 0;
    int gpu, mig;
    char text[256];
    ENTER("nvmlDeviceGetHandleByUUID");
    number("count", &count);
    for (gpu = 0; gpu < count && gpu < 64; gpu++)
        for (mig = 0; mig < 8; mig++) {
            uuid_of(gpu, mig, text, sizeof text);
            if (!strcmp(text, uuid))
                return handle(gpu, mig, out);
        }
    return 6;
}

int nvmlDeviceGetName(device *d, char *out, unsigned size)
{
    (void)d;
    ENTER("nvmlDeviceGetName");
    return copy("name", "NVIDIA H100 80GB HBM3", out, size);
}

int nvmlDeviceGetUUID(device *d, char *out, unsigned size)
{
    ENTER("nvmlDeviceGetUUID");
    uuid_of(d->gpu, d->mig, out, size);
    return 0;
}

int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *count)
{
    (void)d;
    ENTER("nvmlDeviceGetMaxMigDeviceCount");
    *count = 7;
    return 0;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, device **out)
{
    char key[64], text[256];
    ENTER("nvmlDeviceGetMigDeviceHandleByIndex");
    snprintf(key, sizeof key, "mig.%d.%u", d->gpu, index);
    if (index >= 7 || !find(key, text, sizeof text))
        return 6;
    return handle(d->gpu, (int)index + 1, out);
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} pci_info;

int nvmlDeviceGetPciInfo_v3(device *d, pci_info *info)
{
    char key[64], fallback[32];
    ENTER("nvmlDeviceGetPciInfo");
    memset(info, 0, sizeof *info);
    snprintf(key, sizeof key, "bus.%d", d->gpu);
    snprintf(fallback, sizeof fallback, "00000000:%02X:00.0", 0x10 + d->gpu);
    return copy(key, fallback, info->bus_id, sizeof info->bus_id);
}

static unsigned long long memory_of(device *d, const char *what)
{
    char key[64];
    long long value = 0;
    snprintf(key, sizeof key, "memory.%d.%s", d->gpu, what);
    number(key, &value);
    return (unsigned long long)value;
}

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;

int nvmlDeviceGetMemoryInfo(device *d, memory_v1 *m)
{
    ENTER("nvmlDeviceGetMemoryInfo");
    m->total = memory_of(d, "total");
    m->free = memory_of(d, "free");
    m->used = memory_of(d, "used") + memory_of(d, "reserved");
    return 0;
}

int nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *m)
{
    ENTER("nvmlDeviceGetMemoryInfo_v2");
    m->total = memory_of(d, "total");
    m->free = memory_of(d, "free");
    m->used = memory_of(d, "used");
    m->reserved = memory_of(d, "reserved");
    return 0;
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type, code;
    unsigned long long value;
} field_value;

int nvmlDeviceGetFieldValues(device *d, int count, field_value *values)
{
    ENTER("nvmlDeviceGetFieldValues");
    for (int i = 0; i < count; i++) {
        char key[64];
        long long value;
        snprintf(key, sizeof key, "fielderror.%d.%u", d->gpu, values[i].field);
        if (number(key, &value)) {
            values[i].code = (unsigned)value;
            continue;
        }
        snprintf(key, sizeof key, "field.%d.%u.%u", d->gpu, values[i].field, values[i].scope);
        if (!number(key, &value)) {
            snprintf(key, sizeof key, "field.%d.%u", d->gpu, values[i].field);
            if (!number(key, &value)) {
                values[i].code = 3;
                continue;
            }
        }
        values[i].code = 0;
        values[i].type = 3;
        values[i].value = (unsigned long long)value;
    }
    return 0;
}

int nvmlDeviceGetNvLinkState(device *d, unsigned link, unsigned *state)
{
    char key[64];
    long long value;
    ENTER("nvmlDeviceGetNvLinkState");
    snprintf(key, sizeof key, "link.%d.%u", d->gpu, link);
    if (!number(key, &value))
        return 2;
    *state = (unsigned)value;
    return 0;
}

int nvmlDeviceGetNvLinkErrorCounter(device *d, unsigned link, unsigned id, unsigned long long *out)
{
    char key[64];
    long long value;
    ENTER("nvmlDeviceGetNvLinkErrorCounter");
    snprintf(key, sizeof key, "counter.%d.%u.%u", d->gpu, link, id);
    if (!number(key, &value))
        return 3;
    *out = (unsigned long long)value;
    return 0;
}
