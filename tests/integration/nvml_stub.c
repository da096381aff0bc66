/* Answers as libnvidia-ml.so.1 does, from a file of lines "KEY VALUE" that NVML_STUB names.

   A key is INDEX.FACT. A value is a number or a text, "hang" to never come
   back, or "error N" to fail with NVML's error N. What the file does not hold is not supported (3). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int ret;
typedef unsigned long long u64;
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, TOO_SMALL = 7 };

struct device { char name[32]; };

static ret look(const char *of, const char *fact, char *value, size_t size) {
    char line[256], key[96];
    snprintf(key, sizeof key, "%s.%s", of, fact);
    FILE *file = fopen(getenv("NVML_STUB"), "r");
    if (!file) return 9;
    ret found = NOT_SUPPORTED;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *space = strchr(line, ' ');
        if (!space) continue;
        *space = 0;
        if (strcmp(line, key)) continue;
        snprintf(value, size, "%s", space + 1);
        found = OK;
    }
    fclose(file);
    if (found) return found;
    if (!strcmp(value, "hang")) for (;;) pause();
    if (!strncmp(value, "error ", 6)) return atoi(value + 6);
    return OK;
}

static ret number(const char *of, const char *fact, u64 *out) {
    char value[128];
    ret said = look(of, fact, value, sizeof value);
    if (!said) *out = strtoull(value, 0, 0);
    return said;
}

static ret small(struct device *of, const char *fact, unsigned *out) {
    u64 value;
    ret said = number(of->name, fact, &value);
    if (!said) *out = (unsigned)value;
    return said;
}

ret nvmlInitWithFlags(unsigned flags) {
    u64 ignored;
    ret said = number("host", "init", &ignored);
    return said == NOT_SUPPORTED ? OK : said;
}
ret nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(ret code) { return "stub"; }
ret nvmlSystemGetDriverVersion(char *out, unsigned size) { return look("host", "driver", out, size); }
ret nvmlDeviceGetCount_v2(unsigned *out) { u64 n; ret said = number("host", "count", &n); *out = n; return said; }
ret nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out) {
    u64 ignored;
    *out = calloc(1, sizeof **out);
    snprintf((*out)->name, sizeof (*out)->name, "%u", index);
    ret said = number((*out)->name, "handle", &ignored);
    return said == NOT_SUPPORTED ? OK : said;
}
ret nvmlDeviceGetUUID(struct device *d, char *out, unsigned size) { return look(d->name, "uuid", out, size); }
ret nvmlDeviceGetName(struct device *d, char *out, unsigned size) { return look(d->name, "name", out, size); }
struct pci { char old[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
ret nvmlDeviceGetPciInfo_v3(struct device *d, struct pci *out) {
    memset(out, 0, sizeof *out);
    return look(d->name, "bus", out->bus_id, sizeof out->bus_id);
}
ret nvmlDeviceGetClockInfo(struct device *d, unsigned which, unsigned *out) {
    return which == 1 ? small(d, "sm", out) : INVALID;
}
ret nvmlDeviceGetMaxClockInfo(struct device *d, unsigned which, unsigned *out) {
    return which == 1 ? small(d, "sm_max", out) : INVALID;
}
ret nvmlDeviceGetMemoryInfo(struct device *d, u64 out[3]) {
    ret said = number(d->name, "memory_total", out);
    return said ? said : number(d->name, "memory_used", out + 2);
}
ret nvmlDeviceGetTotalEccErrors(struct device *d, unsigned type, unsigned counter, u64 *out) {
    return counter ? INVALID : number(d->name, type ? "uncorrected" : "corrected", out);
}
#ifdef OLD_DRIVER
ret nvmlDeviceGetCurrentClocksThrottleReasons(struct device *d, u64 *out) { return number(d->name, "reasons", out); }
#else
ret nvmlDeviceGetCurrentClocksEventReasons(struct device *d, u64 *out) { return number(d->name, "reasons", out); }
#endif
struct process { unsigned pid; u64 memory; unsigned gi, ci; };
ret nvmlDeviceGetComputeRunningProcesses_v3(struct device *d, unsigned *count, struct process *out) {
    u64 pids[2];
    unsigned found = 0;
    ret said = number(d->name, "pid", pids);
    if (!said) found = 1;
    else if (said != NOT_SUPPORTED) return said;
    if (found && !number(d->name, "pid2", pids + 1)) found = 2;
    if (found && (*count < found || !out)) { *count = found; return TOO_SMALL; }
    for (unsigned at = 0; at < found; at++) out[at] = (struct process){(unsigned)pids[at], 1ULL << 30, 0, 0};
    *count = found;
    return OK;
}
