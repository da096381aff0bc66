/* Answers as libnvidia-ml.so.1 does, from a file of lines "KEY VALUE" that NVML_STUB names.

   A key is INDEX.FACT, or INDEX/INSTANCE.FACT for a MIG device. A value is a number or a text, "hang" to never come
   back, or "error N" to fail with NVML's error N. What the file does not hold is not supported (3). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int ret;
typedef unsigned long long u64;
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };

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

#define SMALL(function, fact) ret function(struct device *d, unsigned *out) { return small(d, fact, out); }
#define CHOSEN(function, first, second) \
    ret function(struct device *d, unsigned which, unsigned *out) { return small(d, which == 1 ? first : second, out); }

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
CHOSEN(nvmlDeviceGetClockInfo, "sm", "memory")
CHOSEN(nvmlDeviceGetMaxClockInfo, "sm_max", "memory_max")
CHOSEN(nvmlDeviceGetTemperatureThreshold, "slowdown", "shutdown")
SMALL(nvmlDeviceGetPowerUsage, "power")
SMALL(nvmlDeviceGetEnforcedPowerLimit, "power_limit")
SMALL(nvmlDeviceGetPowerManagementDefaultLimit, "power_default")
SMALL(nvmlDeviceGetPcieReplayCounter, "replays")
SMALL(nvmlDeviceGetCurrPcieLinkGeneration, "gen")
SMALL(nvmlDeviceGetMaxPcieLinkGeneration, "gen_max")
SMALL(nvmlDeviceGetCurrPcieLinkWidth, "width")
SMALL(nvmlDeviceGetMaxPcieLinkWidth, "width_max")
SMALL(nvmlDeviceGetMaxMigDeviceCount, "mig_max")
SMALL(nvmlDeviceGetGpuInstanceId, "gi")
SMALL(nvmlDeviceGetComputeInstanceId, "ci")
ret nvmlDeviceGetTemperature(struct device *d, unsigned sensor, unsigned *out) { return small(d, "temperature", out); }
ret nvmlDeviceGetTotalEccErrors(struct device *d, unsigned type, unsigned counter, u64 *out) {
    return counter ? INVALID : number(d->name, type ? "uncorrected" : "corrected", out);
}
#ifdef OLD_DRIVER
ret nvmlDeviceGetCurrentClocksThrottleReasons(struct device *d, u64 *out) { return number(d->name, "reasons", out); }
#else
ret nvmlDeviceGetCurrentClocksEventReasons(struct device *d, u64 *out) { return number(d->name, "reasons", out); }
#endif
ret nvmlDeviceGetUtilizationRates(struct device *d, unsigned out[2]) {
    ret said = small(d, "used", out);
    return said ? said : small(d, "memory_used", out + 1);
}
ret nvmlDeviceGetNvLinkState(struct device *d, unsigned link, unsigned *out) {
    u64 links, up;
    if (number(d->name, "links", &links)) return NOT_SUPPORTED;
    if (link >= links) return INVALID;
    *out = number(d->name, "links_up", &up) ? 1 : link < up;
    return OK;
}
ret nvmlDeviceGetNvLinkErrorCounter(struct device *d, unsigned link, unsigned counter, u64 *out) {
    static const char *const facts[] = {"link_replay", "link_recovery", "link_flit", "link_data"};
    return counter < 4 ? number(d->name, facts[counter], out) : INVALID;
}
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
ret nvmlDeviceGetMigMode(struct device *d, unsigned *now, unsigned *pending) {
    *pending = 0;
    return small(d, "mig", now);
}
ret nvmlDeviceGetMigDeviceHandleByIndex(struct device *d, unsigned index, struct device **out) {
    char name[32], value[128];
    snprintf(name, sizeof name, "%.20s/%u", d->name, index);
    if (look(name, "uuid", value, sizeof value)) return NOT_FOUND;
    *out = calloc(1, sizeof **out);
    memcpy((*out)->name, name, sizeof name);
    return OK;
}
