/* A stand-in for NVIDIA's libnvidia-ml.so.1, so that real NVML clients (nvidia-ml-py, nvitop, gpustat, torch) run on a
 * machine without a GPU. What it shows is a text file, named by FAKE_NVML and read again whenever it changes. The
 * grammar is in __init__.py, beside the class that writes such files.
 *
 * Three driver eras, chosen when compiled; a missing symbol cannot be faked by an error code:
 *   -DERA=470   before nvmlDeviceGetMemoryInfo_v2 and before the _v3 process lists
 *   -DERA=535   535.43 to 535.85: the _v3 process lists have records of 32 bytes, not 24
 *   -DERA=570   what is current
 * It fakes management, not CUDA: torch.cuda.is_available() stays False. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef ERA
#define ERA 570
#endif

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999 };

static const struct { int code; const char *name, *text; } ERRORS[] = {
    {0, "SUCCESS", "Success"},
    {1, "UNINITIALIZED", "Uninitialized"},
    {2, "INVALID_ARGUMENT", "Invalid Argument"},
    {3, "NOT_SUPPORTED", "Not Supported"},
    {4, "NO_PERMISSION", "Insufficient Permissions"},
    {6, "NOT_FOUND", "Not Found"},
    {7, "INSUFFICIENT_SIZE", "Insufficient Size"},
    {9, "DRIVER_NOT_LOADED", "Driver Not Loaded"},
    {10, "TIMEOUT", "Timeout"},
    {15, "GPU_IS_LOST", "GPU is lost"},
    {16, "RESET_REQUIRED", "GPU requires reset"},
    {17, "OPERATING_SYSTEM", "The operating system has blocked the request"},
    {18, "LIB_RM_VERSION_MISMATCH", "Driver/library version mismatch"},
    {25, "ARGUMENT_VERSION_MISMATCH", "Argument version mismatch"},
    {999, "UNKNOWN", "Unknown Error"},
};
#define COUNT(array) (int)(sizeof(array) / sizeof *(array))

/* --- the machine that the scenario describes ---------------------------------------------------------------------- */

enum { GPUS = 32, MIGS = 8, PROCESSES = 64, PLANTED = 16, NOWHERE = -1 };
#define NO_INSTANCE 0xFFFFFFFFu

typedef struct { unsigned pid; char type; double mib; unsigned gi, ci; } Process;  /* mib < 0: not available */
typedef struct { char function[64]; int code; } Planted;                           /* an error to return */

typedef struct Device {
    int present, number, parent, mig_mode;  /* parent: the GPU of a MIG device, NOWHERE for a GPU */
    char name[96], uuid[96];
    unsigned domain, bus, slot;
    int cc_major, cc_minor, numa, compute_mode, persistence;
    double mem, used, reserved, util, temp, power, plimit, plimit_default, ecc, replays, recoveries, crc, throttle, width, max_width, remap, delay, fan;
    unsigned gi, ci;
    int processes, planted;
    Process process[PROCESSES];
    Planted error[PLANTED];
} Device;

static Device gpu[GPUS], mig[GPUS][MIGS];
static int shown[GPUS], shown_count;  /* what NVML's indices mean: all GPUs, or those of FAKE_NVML_VISIBLE */
static int topology[GPUS][GPUS], nvlinks[GPUS][GPUS], p2p[GPUS][GPUS];
static char driver[32], procs_dir[512];
static int cuda, init_error, initialized;

static int error_code(const char *name) {
    for (int i = 0; i < COUNT(ERRORS); i++)
        if (!strcmp(ERRORS[i].name, name)) return ERRORS[i].code;
    return UNKNOWN;
}

/* --- reading the scenario ------------------------------------------------------------------------------------------ */

static void defaults(Device *d, int number, int parent) {
    memset(d, 0, sizeof *d);
    d->present = 1, d->number = number, d->parent = parent;
    d->bus = 0x10 + number, d->cc_major = 8, d->persistence = 1, d->gi = d->ci = NO_INSTANCE;
    d->mem = 81920, d->reserved = 512, d->temp = 30, d->power = 60, d->plimit = d->plimit_default = 400, d->width = d->max_width = 16;
    d->fan = -1;
    snprintf(d->name, sizeof d->name, "NVIDIA Fake GPU");
    snprintf(d->uuid, sizeof d->uuid, "GPU-%08x-0000-4000-8000-%012x", 0xfa4e0000 + number, number);
}

static void set(Device *d, const char *key, const char *value) {
    const struct { const char *key; double *to; } numbers[] = {
        {"mem", &d->mem}, {"used", &d->used}, {"reserved", &d->reserved}, {"util", &d->util}, {"temp", &d->temp},
        {"power", &d->power}, {"plimit", &d->plimit}, {"plimit_default", &d->plimit_default}, {"replays", &d->replays},
        {"recoveries", &d->recoveries}, {"crc", &d->crc}, {"ecc", &d->ecc}, {"throttle", &d->throttle},
        {"width", &d->width}, {"max_width", &d->max_width}, {"remap", &d->remap}, {"delay", &d->delay}, {"fan", &d->fan},
    };
    const struct { const char *key; int *to; } integers[] = {
        {"numa", &d->numa}, {"compute_mode", &d->compute_mode}, {"persistence", &d->persistence}, {"mig", &d->mig_mode},
        {"gi", (int *)&d->gi}, {"ci", (int *)&d->ci},
    };
    for (int i = 0; i < COUNT(numbers); i++)
        if (!strcmp(numbers[i].key, key)) { *numbers[i].to = atof(value); return; }
    for (int i = 0; i < COUNT(integers); i++)
        if (!strcmp(integers[i].key, key)) { *integers[i].to = atoi(value); return; }
    if (!strcmp(key, "name")) snprintf(d->name, sizeof d->name, "%s", value);
    else if (!strcmp(key, "uuid")) snprintf(d->uuid, sizeof d->uuid, "%s", value);
    else if (!strcmp(key, "bus")) sscanf(value, "%x:%x:%x", &d->domain, &d->bus, &d->slot);
    else if (!strcmp(key, "cc")) sscanf(value, "%d.%d", &d->cc_major, &d->cc_minor);
    else { fprintf(stderr, "fakenvml: unknown key %s\n", key); abort(); }
}

/* Cuts a line into words at spaces; "double quotes" keep spaces; # begins a comment. */
static int words_of(char *line, char **words, int most) {
    int n = 0;
    for (char *p = line; n < most;) {
        while (*p == ' ' || *p == '\t' || *p == '\n') p++;
        if (!*p || *p == '#') break;
        char *to = words[n++] = p;
        for (int quoted = 0; *p && (quoted || (*p != ' ' && *p != '\n')); p++) {
            if (*p == '"') quoted = !quoted;
            else *to++ = *p;
        }
        if (*p) p++;
        *to = 0;
    }
    return n;
}

static void read_process(char **words, int n) {  /* proc GPU[.MIG] pid= mem= type= */
    int number = atoi(words[1]);
    char *dot = strchr(words[1], '.');
    Device *d = dot ? &mig[number][atoi(dot + 1)] : &gpu[number];
    if (d->processes == PROCESSES) return;
    Process *p = &d->process[d->processes++];
    *p = (Process){.type = 'C', .gi = d->gi, .ci = d->ci};
    for (int k = 2; k < n; k++) {
        char *value = strchr(words[k], '=');
        if (!value) continue;
        *value++ = 0;
        if (!strcmp(words[k], "pid")) p->pid = strtoul(value, NULL, 10);
        if (!strcmp(words[k], "type")) p->type = *value;
        if (!strcmp(words[k], "mem")) p->mib = strcmp(value, "NA") ? atof(value) : -1;
    }
}

static void read_line(char **words, int n) {
    int a = n > 1 ? atoi(words[1]) % GPUS : 0, b = n > 2 ? atoi(words[2]) % GPUS : 0;
    if (!strcmp(words[0], "driver")) snprintf(driver, sizeof driver, "%s", words[1]);
    else if (!strcmp(words[0], "cuda")) cuda = atoi(words[1]);
    else if (!strcmp(words[0], "init")) init_error = error_code(words[1]);
    else if (!strcmp(words[0], "procs_dir")) snprintf(procs_dir, sizeof procs_dir, "%s", words[1]);
    else if (!strcmp(words[0], "proc")) read_process(words, n);
    else if (!strcmp(words[0], "gpu") || !strcmp(words[0], "mig")) {
        int is_mig = words[0][0] == 'm';
        Device *d = is_mig ? &mig[a][b % MIGS] : &gpu[a];
        if (is_mig) {
            defaults(d, b % MIGS, a);
            d->reserved = 0, d->mem = 9856, d->gi = 7 + b, d->ci = 0;
            d->cc_major = gpu[a].cc_major, d->cc_minor = gpu[a].cc_minor, gpu[a].mig_mode = 1;
            snprintf(d->uuid, sizeof d->uuid, "MIG-%08x-0000-4000-8000-%04x%08x", 0x31600000 + a, a, b);
            snprintf(d->name, sizeof d->name, "%.70s MIG 1g.10gb", gpu[a].name);
        } else if (!d->present) {
            defaults(d, a, NOWHERE);
            shown[shown_count++] = a;
        }
        for (int k = is_mig ? 3 : 2; k < n; k++) {
            char *value = strchr(words[k], '=');
            if (value) *value++ = 0, set(d, words[k], value);
        }
    } else if (!strcmp(words[0], "err")) {
        for (int k = 2; k < n && gpu[a].planted < PLANTED; k++) {
            char *value = strchr(words[k], '=');
            if (!value) continue;
            *value++ = 0;
            Planted *e = &gpu[a].error[gpu[a].planted++];
            snprintf(e->function, sizeof e->function, "%s", words[k]);
            e->code = error_code(value);
        }
    } else if (!strcmp(words[0], "link")) {
        for (int k = 3; k < n; k++) {
            char *value = strchr(words[k], '=');
            if (!value) continue;
            *value++ = 0;
            int (*to)[GPUS] = !strcmp(words[k], "topo") ? topology : !strcmp(words[k], "nvlink") ? nvlinks : p2p;
            to[a][b] = to[b][a] = atoi(value);
        }
    } else { fprintf(stderr, "fakenvml: unknown line %s\n", words[0]); abort(); }
}

static void load(void) {
    static struct stat last;
    struct stat now;
    const char *path = getenv("FAKE_NVML");
    if (!path || stat(path, &now)) { init_error = DRIVER_NOT_LOADED; return; }
    if (last.st_ino == now.st_ino && last.st_size == now.st_size && last.st_mtim.tv_sec == now.st_mtim.tv_sec &&
        last.st_mtim.tv_nsec == now.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file) { init_error = DRIVER_NOT_LOADED; return; }
    last = now;
    memset(gpu, 0, sizeof gpu), memset(mig, 0, sizeof mig);
    memset(nvlinks, 0, sizeof nvlinks), memset(p2p, 0, sizeof p2p);
    for (int i = 0; i < GPUS; i++)
        for (int j = 0; j < GPUS; j++) topology[i][j] = 40;
    shown_count = init_error = 0, cuda = ERA >= 570 ? 12080 : ERA >= 535 ? 12020 : 11040;
    snprintf(driver, sizeof driver, ERA >= 570 ? "570.86.15" : ERA >= 535 ? "535.54.03" : "470.199.02");
    procs_dir[0] = 0;
    char line[4096], *words[64];
    while (fgets(line, sizeof line, file)) {
        int n = words_of(line, words, COUNT(words));
        if (n) read_line(words, n);
    }
    fclose(file);
    const char *visible = getenv("FAKE_NVML_VISIBLE");  /* a container with some of the GPUs */
    if (!visible) return;
    char copy[256], *rest, *word;
    snprintf(copy, sizeof copy, "%s", visible);
    shown_count = 0;
    for (word = strtok_r(copy, ",", &rest); word; word = strtok_r(NULL, ",", &rest))
        if (gpu[atoi(word) % GPUS].present) shown[shown_count++] = atoi(word) % GPUS;
}

/* --- processes and memory ------------------------------------------------------------------------------------------ */

static int is_alive(unsigned pid) {  /* a zombie holds no GPU memory */
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = 0;
    char *end = strrchr(text, ')');
    return end && end[2] != 'Z' && end[2] != 'X';
}

/* Processes of one type (0: all) on a device: those of the scenario, and live ones that signed up in procs_dir. */
static int list(Device *d, char type, Process *out) {
    int n = 0;
    for (int i = 0; i < d->processes; i++)
        if (!type || d->process[i].type == type) out[n++] = d->process[i];
    if (d->parent == NOWHERE)
        for (int j = 0; j < MIGS; j++)
            for (int i = 0; i < mig[d->number][j].processes && n < PROCESSES; i++)
                if (!type || mig[d->number][j].process[i].type == type) out[n++] = mig[d->number][j].process[i];
    DIR *folder = procs_dir[0] ? opendir(procs_dir) : NULL;
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        unsigned pid = strtoul(entry->d_name, NULL, 10);
        if (!pid || !is_alive(pid)) continue;
        char path[800], place[16], kind;
        double mib;
        snprintf(path, sizeof path, "%s/%s", procs_dir, entry->d_name);
        FILE *file = fopen(path, "r");
        while (file && n < PROCESSES && fscanf(file, "%15s %c %lf", place, &kind, &mib) == 3) {
            char *dot = strchr(place, '.');
            int number = atoi(place), part = dot ? atoi(dot + 1) : NOWHERE;
            int here = d->parent == NOWHERE ? number == d->number : number == d->parent && part == d->number;
            if (here && (!type || kind == type))
                out[n++] = (Process){pid, kind, mib, dot ? mig[number][part].gi : NO_INSTANCE, dot ? 0 : NO_INSTANCE};
        }
        if (file) fclose(file);
    }
    if (folder) closedir(folder);
    return n;
}

static double used_mib(Device *d) {
    Process all[PROCESSES * 2];
    double used = d->used;
    for (int i = list(d, 0, all); i--;)
        if (all[i].mib > 0) used += all[i].mib;
    return used < d->mem - d->reserved ? used : d->mem - d->reserved;
}

static uint64_t bytes(double mib) { return (uint64_t)(mib * 1048576.0); }

/* --- the interface ------------------------------------------------------------------------------------------------- */

#define NVML __attribute__((visibility("default"))) int

/* The error planted for a function (by a prefix of its name, "*" for all), after the device's delay. */
static int planted(Device *d, const char *function) {
    if (!initialized) return UNINITIALIZED;
    load();
    if (!d || !d->present) return INVALID_ARGUMENT;
    Device *owner = d->parent == NOWHERE ? d : &gpu[d->parent];
    if (owner->delay > 0) usleep((useconds_t)(owner->delay * 1000));
    for (int i = 0; i < owner->planted; i++) {
        const char *name = owner->error[i].function;
        if (!strcmp(name, "*") || !strncmp(name, function, strlen(name))) return owner->error[i].code;
    }
    return SUCCESS;
}
#define CHECK(d) do { int code = planted(d, __func__); if (code) return code; } while (0)
#define GETTER(function, type, value) NVML function(Device *d, type *out) { CHECK(d); *out = (type)(value); return SUCCESS; }

static int give(char *buffer, unsigned size, const char *text) {
    if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return SUCCESS;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(int code) {
    for (int i = 0; i < COUNT(ERRORS); i++)
        if (ERRORS[i].code == code) return ERRORS[i].text;
    return "Unknown Error";
}
NVML nvmlInitWithFlags(unsigned flags) { (void)flags; load(); if (init_error) return init_error; initialized++; return SUCCESS; }
NVML nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
NVML nvmlInit(void) { return nvmlInitWithFlags(0); }
NVML nvmlShutdown(void) { if (!initialized) return UNINITIALIZED; initialized--; return SUCCESS; }

NVML nvmlSystemGetDriverVersion(char *out, unsigned size) { load(); return give(out, size, driver); }
NVML nvmlSystemGetNVMLVersion(char *out, unsigned size) { char t[64]; snprintf(t, 64, "12.%s", driver); return give(out, size, t); }
NVML nvmlSystemGetCudaDriverVersion_v2(int *out) { load(); *out = cuda; return SUCCESS; }
NVML nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }
NVML nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) { (void)pid; (void)out; (void)size; return NOT_FOUND; }

NVML nvmlDeviceGetCount_v2(unsigned *out) { if (!initialized) return UNINITIALIZED; load(); *out = shown_count; return SUCCESS; }
NVML nvmlDeviceGetCount(unsigned *out) { return nvmlDeviceGetCount_v2(out); }
NVML nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    if (!initialized) return UNINITIALIZED;
    load();
    if (index >= (unsigned)shown_count) return INVALID_ARGUMENT;
    CHECK(&gpu[shown[index]]);
    *out = &gpu[shown[index]];
    return SUCCESS;
}
NVML nvmlDeviceGetHandleByIndex(unsigned index, Device **out) { return nvmlDeviceGetHandleByIndex_v2(index, out); }
NVML nvmlDeviceGetHandleByUUID(const char *uuid, Device **out) {
    for (int i = 0; i < shown_count; i++) {
        Device *d = &gpu[shown[i]];
        if (!strcmp(d->uuid, uuid)) { CHECK(d); *out = d; return SUCCESS; }
        for (int j = 0; j < MIGS; j++)
            if (mig[shown[i]][j].present && !strcmp(mig[shown[i]][j].uuid, uuid)) { *out = &mig[shown[i]][j]; return SUCCESS; }
    }
    return NOT_FOUND;
}
NVML nvmlDeviceGetIndex(Device *d, unsigned *out) {
    CHECK(d);
    for (int k = 0; k < shown_count; k++)
        if (d->parent != NOWHERE || shown[k] == d->number) { *out = d->parent != NOWHERE ? d->number : k; return SUCCESS; }
    return NOT_FOUND;
}
NVML nvmlDeviceGetName(Device *d, char *out, unsigned size) { CHECK(d); return give(out, size, d->name); }
NVML nvmlDeviceGetUUID(Device *d, char *out, unsigned size) { CHECK(d); return give(out, size, d->uuid); }
GETTER(nvmlDeviceGetMinorNumber, unsigned, d->number)

typedef struct { char bus_id_legacy[16]; unsigned domain, bus, device, pci_device_id, pci_subsystem_id; char bus_id[32]; } Pci;
NVML nvmlDeviceGetPciInfo_v3(Device *d, Pci *out) {
    CHECK(d);
    memset(out, 0, sizeof *out);
    Device *g = d->parent == NOWHERE ? d : &gpu[d->parent];
    snprintf(out->bus_id_legacy, 16, "%04X:%02X:%02X.0", g->domain & 0xffff, g->bus & 0xff, g->slot & 0xff);
    snprintf(out->bus_id, 32, "%08X:%02X:%02X.0", g->domain, g->bus, g->slot);
    out->domain = g->domain, out->bus = g->bus, out->device = g->slot;
    return SUCCESS;
}
NVML nvmlDeviceGetPciInfo(Device *d, Pci *out) { return nvmlDeviceGetPciInfo_v3(d, out); }

NVML nvmlDeviceGetMemoryInfo(Device *d, uint64_t *out) {  /* total, free, used; used counts what the driver reserves */
    CHECK(d);
    double used = used_mib(d) + d->reserved;
    out[0] = bytes(d->mem), out[1] = bytes(d->mem - used), out[2] = bytes(used);
    return SUCCESS;
}
#if ERA >= 535
typedef struct { unsigned version; uint64_t total, reserved, free, used; } Memory2;
NVML nvmlDeviceGetMemoryInfo_v2(Device *d, Memory2 *out) {
    CHECK(d);
    if (out->version != (sizeof(Memory2) | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    double used = used_mib(d);
    out->total = bytes(d->mem), out->reserved = bytes(d->reserved), out->used = bytes(used);
    out->free = bytes(d->mem - d->reserved - used);
    return SUCCESS;
}
#endif

NVML nvmlDeviceGetUtilizationRates(Device *d, unsigned *out) {  /* GPU, memory; not for MIG */
    CHECK(d);
    if (d->parent != NOWHERE || d->mig_mode) return NOT_SUPPORTED;
    out[0] = (unsigned)d->util, out[1] = (unsigned)d->util / 2;
    return SUCCESS;
}
NVML nvmlDeviceGetEncoderUtilization(Device *d, unsigned *out, unsigned *us) { CHECK(d); *out = 0, *us = 1000000; return SUCCESS; }
NVML nvmlDeviceGetDecoderUtilization(Device *d, unsigned *out, unsigned *us) { CHECK(d); *out = 0, *us = 1000000; return SUCCESS; }
NVML nvmlDeviceGetTemperature(Device *d, unsigned sensor, unsigned *out) { (void)sensor; CHECK(d); *out = (unsigned)d->temp; return SUCCESS; }
#if ERA >= 570
NVML nvmlDeviceGetTemperatureV(Device *d, unsigned *out) { CHECK(d); out[2] = (unsigned)d->temp; return SUCCESS; }
#endif
NVML nvmlDeviceGetFanSpeed(Device *d, unsigned *out) { CHECK(d); if (d->fan < 0) return NOT_SUPPORTED; *out = (unsigned)d->fan; return SUCCESS; }
GETTER(nvmlDeviceGetPowerUsage, unsigned, d->power * 1000)
GETTER(nvmlDeviceGetPowerManagementLimit, unsigned, d->plimit * 1000)
GETTER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, d->plimit_default * 1000)
GETTER(nvmlDeviceGetEnforcedPowerLimit, unsigned, d->plimit * 1000)
GETTER(nvmlDeviceGetPersistenceMode, unsigned, d->persistence)
GETTER(nvmlDeviceGetComputeMode, unsigned, d->compute_mode)
GETTER(nvmlDeviceGetDisplayMode, unsigned, 0)
GETTER(nvmlDeviceGetDisplayActive, unsigned, 0)
GETTER(nvmlDeviceGetPerformanceState, unsigned, 0)
GETTER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, d->width)
GETTER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, d->max_width)
GETTER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, 4)
GETTER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 4)
GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, uint64_t, d->throttle)
#if ERA >= 535
GETTER(nvmlDeviceGetCurrentClocksEventReasons, uint64_t, d->throttle)
#endif
NVML nvmlDeviceGetClockInfo(Device *d, unsigned kind, unsigned *out) { (void)kind; CHECK(d); *out = 1410; return SUCCESS; }
NVML nvmlDeviceGetMaxClockInfo(Device *d, unsigned kind, unsigned *out) { (void)kind; CHECK(d); *out = 1980; return SUCCESS; }
NVML nvmlDeviceGetCudaComputeCapability(Device *d, int *major, int *minor) { CHECK(d); *major = d->cc_major, *minor = d->cc_minor; return SUCCESS; }
NVML nvmlDeviceGetEccMode(Device *d, unsigned *now, unsigned *next) { CHECK(d); *now = *next = 1; return SUCCESS; }
NVML nvmlDeviceGetTotalEccErrors(Device *d, unsigned kind, unsigned since, uint64_t *out) {
    (void)since;
    CHECK(d);
    *out = kind == 1 ? (uint64_t)d->ecc : 0;  /* 1: uncorrected */
    return SUCCESS;
}
NVML nvmlDeviceGetRemappedRows(Device *d, unsigned *good, unsigned *bad, unsigned *pending, unsigned *failed) {
    CHECK(d);
    *good = *bad = *failed = 0, *pending = d->remap > 0;
    return SUCCESS;
}
NVML nvmlDeviceGetNumaNodeId(Device *d, unsigned *out) { CHECK(d); if (d->numa < 0) return NOT_SUPPORTED; *out = d->numa; return SUCCESS; }
NVML nvmlDeviceGetMemoryAffinity(Device *d, unsigned size, unsigned long *out, unsigned scope) {
    (void)scope;
    CHECK(d);
    if (d->numa < 0) return NOT_SUPPORTED;
    memset(out, 0, size * sizeof *out);
    out[0] = 1ul << d->numa;
    return SUCCESS;
}

/* Process lists: _v1 had pid and memory, _v2 and _v3 add the MIG instance, and 535's _v3 one more number. */
typedef struct { unsigned pid; uint64_t memory; } Process1;
typedef struct { unsigned pid; uint64_t memory; unsigned gi, ci; } Process2;
typedef struct { unsigned pid; uint64_t memory; unsigned gi, ci; uint64_t protected_memory; } Process535;
#define FILL(Record)                                                                                                  \
    Process all[PROCESSES * 2];                                                                                       \
    int n = list(d, type, all);                                                                                       \
    if (n && (!out || *count < (unsigned)n)) { *count = n; return INSUFFICIENT_SIZE; }                                \
    *count = n;                                                                                                       \
    for (int i = 0; i < n; i++) {                                                                                     \
        memset(&out[i], 0, sizeof(Record));                                                                           \
        out[i].pid = all[i].pid, out[i].memory = all[i].mib < 0 ? ~0ull : bytes(all[i].mib);                          \
    }
#define INSTANCES for (int i = 0; i < n; i++) out[i].gi = all[i].gi, out[i].ci = all[i].ci;
static int fill1(Device *d, char type, unsigned *count, Process1 *out) { FILL(Process1) return SUCCESS; }
static int fill2(Device *d, char type, unsigned *count, Process2 *out) { FILL(Process2) INSTANCES return SUCCESS; }
#if ERA == 535
typedef Process535 Process3;
static int fill3(Device *d, char type, unsigned *count, Process535 *out) { FILL(Process535) INSTANCES return SUCCESS; }
#else
typedef Process2 Process3;
#define fill3 fill2
#endif
#define LISTS(function, type)                                                                                         \
    NVML function(Device *d, unsigned *count, Process1 *out) { CHECK(d); return fill1(d, type, count, out); }         \
    NVML function##_v2(Device *d, unsigned *count, Process2 *out) { CHECK(d); return fill2(d, type, count, out); }
#define LISTS3(function, type)                                                                                        \
    NVML function##_v3(Device *d, unsigned *count, Process3 *out) { CHECK(d); return fill3(d, type, count, out); }
LISTS(nvmlDeviceGetComputeRunningProcesses, 'C')
LISTS(nvmlDeviceGetGraphicsRunningProcesses, 'G')
LISTS(nvmlDeviceGetMPSComputeRunningProcesses, 'M')
#if ERA >= 535
LISTS3(nvmlDeviceGetComputeRunningProcesses, 'C')
LISTS3(nvmlDeviceGetGraphicsRunningProcesses, 'G')
LISTS3(nvmlDeviceGetMPSComputeRunningProcesses, 'M')
NVML nvmlDeviceGetConfComputeMemSizeInfo(Device *d, void *out) { (void)out; CHECK(d); return NOT_SUPPORTED; }
#endif
#if ERA >= 570  /* nvitop tells the 32-byte records by its absence */
NVML nvmlDeviceGetRunningProcessDetailList(Device *d, void *out) { (void)out; CHECK(d); return NOT_SUPPORTED; }
#endif

NVML nvmlDeviceGetProcessUtilization(Device *d, void *out, unsigned *count, uint64_t since) {
    (void)out, (void)count, (void)since;
    CHECK(d);
    return NOT_FOUND;  /* no sample since then */
}

/* MIG: a device inside a GPU has its own handle. */
NVML nvmlDeviceGetMigMode(Device *d, unsigned *now, unsigned *next) {
    CHECK(d);
    if (d->cc_major < 8) return NOT_SUPPORTED;
    *now = *next = d->mig_mode;
    return SUCCESS;
}
GETTER(nvmlDeviceGetMaxMigDeviceCount, unsigned, d->mig_mode ? MIGS : 0)
NVML nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **out) {
    CHECK(d);
    if (index >= MIGS || !mig[d->number][index].present) return NOT_FOUND;
    *out = &mig[d->number][index];
    return SUCCESS;
}
GETTER(nvmlDeviceIsMigDeviceHandle, unsigned, d->parent != NOWHERE)
GETTER(nvmlDeviceGetGpuInstanceId, unsigned, d->gi)
GETTER(nvmlDeviceGetComputeInstanceId, unsigned, d->ci)
GETTER(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, Device *, d->parent == NOWHERE ? NULL : &gpu[d->parent])

/* Topology. */
NVML nvmlDeviceGetTopologyCommonAncestor(Device *a, Device *b, unsigned *out) { CHECK(a); *out = a == b ? 0 : topology[a->number][b->number]; return SUCCESS; }
NVML nvmlDeviceGetP2PStatus(Device *a, Device *b, unsigned kind, unsigned *out) { (void)kind; CHECK(a); *out = p2p[a->number][b->number]; return SUCCESS; }
static int peer(Device *d, unsigned link) {  /* the GPU at the other end of one of d's links */
    for (int j = 0; j < GPUS; j++)
        for (int k = 0; k < nvlinks[d->number][j]; k++)
            if (!link--) return j;
    return NOWHERE;
}
NVML nvmlDeviceGetNvLinkState(Device *d, unsigned link, unsigned *active) {
    CHECK(d);
    if (peer(d, 0) == NOWHERE) return NOT_SUPPORTED;
    if (link >= 18) return INVALID_ARGUMENT;
    *active = peer(d, link) != NOWHERE;
    return SUCCESS;
}
/* A GPU's counts stand on its first link: replays, recoveries, CRC errors of flits; CRC errors of data: none. */
NVML nvmlDeviceGetNvLinkErrorCounter(Device *d, unsigned link, unsigned kind, unsigned long long *out) {
    CHECK(d);
    if (peer(d, link) == NOWHERE) return NOT_SUPPORTED;
    const double counts[] = {d->replays, d->recoveries, d->crc, 0};
    if (kind >= COUNT(counts)) return INVALID_ARGUMENT;
    *out = link ? 0 : (unsigned long long)counts[kind];
    return SUCCESS;
}
NVML nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *d, unsigned link, Pci *out) {
    CHECK(d);
    int other = peer(d, link);
    return other == NOWHERE ? NOT_SUPPORTED : nvmlDeviceGetPciInfo_v3(&gpu[other], out);
}
NVML nvmlDeviceGetFieldValues(Device *d, int n, void *out) { (void)n; (void)out; CHECK(d); return NOT_SUPPORTED; }
