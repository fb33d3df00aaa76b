// What device memory is used for, by class. Both backends' device_alloc count here; `what` is "class:
// detail", or the class alone.
#pragma once
#include "llmc/base/common.h"
#ifdef __cplusplus
extern "C" {
#endif

int memory_class(const char *what); // its number, the same for the same class; beyond the table: "others"
void memory_change(int class_number, int64_t bytes);
// One line of the table, owned by the caller: the classes, in the order of their first use, then the sum.
// NULL after the last.
char *memory_line(int index);
size_t memory_now(void);
size_t memory_peak(void);

#ifdef __cplusplus
}
#endif
