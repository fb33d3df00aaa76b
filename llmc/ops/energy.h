// Energy of work on the device, from the counter of its backend (backend_energy).
#pragma once
#include "llmc/ops/backend.h"
#ifdef __cplusplus
extern "C" {
#endif

// Mean power of the device, W, while nothing runs. Right after work its clocks are still up, as between the
// ops of a step. Fatal where the counter cannot be read, and where it hardly moves in ten times so many
// seconds.
double energy_idle_watts(double seconds);

// Of a piece of work that runs alone again and again, without a pause between the pieces.
typedef struct {
    double seconds, watts; // of one piece; mean power meanwhile
} EnergyOfWork;
// Runs it for seconds / 4 to warm up and then for `seconds`, or for longer until the counter has moved three
// times. queue: queues it once on s; work: its argument, of the caller; once: about how long it takes,
// seconds. Fatal as above.
EnergyOfWork energy_of_work(Stream s, void (*queue)(Stream s, void *work), void *work, double once,
                            double seconds);

#ifdef __cplusplus
}
#endif
