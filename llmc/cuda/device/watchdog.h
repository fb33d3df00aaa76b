// Ends the program when the host has waited too long for the GPU.
#pragma once
#ifdef __cplusplus
extern "C" {
#endif

// Starts the thread that watches. A wait of more than `seconds` ends the program with EXIT_DEVICE. Call once.
void watchdog_start(double seconds);
void watchdog_stop(void);
// Around every call that blocks until the GPU has done something. Any thread; waits of several threads may
// overlap.
void watchdog_wait_begin(void);
void watchdog_wait_end(void);

#ifdef __cplusplus
}
#endif
