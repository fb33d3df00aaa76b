#include "llmc/base/memory.h"
#include <string.h>

enum { MAX_CLASSES = 24, NAME = 40 };
static struct {
    char name[MAX_CLASSES][NAME];
    int64_t bytes[MAX_CLASSES], most[MAX_CLASSES];
    int count;
    int64_t now, peak;
} memory;

int memory_class(const char *what)
{
    char name[NAME];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(what, ":"), what);
    int i = 0;
    while (i < memory.count && strcmp(memory.name[i], name))
        i++;
    if (i == MAX_CLASSES)
        return MAX_CLASSES - 1; // "others"
    if (i == MAX_CLASSES - 1)
        strcpy(name, "others");
    if (i == memory.count)
        memcpy(memory.name[memory.count++], name, NAME);
    return i;
}

void memory_change(int i, int64_t bytes)
{
    memory.bytes[i] += bytes;
    memory.now += bytes;
    if (memory.bytes[i] > memory.most[i])
        memory.most[i] = memory.bytes[i];
    if (memory.now > memory.peak)
        memory.peak = memory.now;
}

char *memory_line(int index)
{
    if (index > memory.count)
        return NULL;
    const char *name = index < memory.count ? memory.name[index] : "sum";
    int64_t bytes = index < memory.count ? memory.bytes[index] : memory.now,
            most = index < memory.count ? memory.most[index] : memory.peak;
    return format_string("%-20s %9.1f MiB, at most %9.1f", name, (double)bytes / 1048576,
                         (double)most / 1048576);
}

size_t memory_now(void) { return (size_t)memory.now; }
size_t memory_peak(void) { return (size_t)memory.peak; }
