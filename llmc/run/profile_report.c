#include "llmc/run/profile_report.h"
#include "llmc/run/profile_plan.h"
#include <math.h>
#include <stdlib.h>

void profile_report_ops(Logger *l, const Ceilings *c)
{
    char *line;
    for (int i = 0; (line = profile_line(i, PROFILE_TRACED, c)); i++) {
        logger_profile(l, "%s", line);
        free(line);
    }
}

void profile_report_steps(Logger *l, const UntracedSteps *u, bool several_ranks)
{
    double sum_ms = profile_device_ms() / PROFILE_TRACED, busy_ms = profile_busy_ms() / PROFILE_TRACED,
           span_ms = profile_span_ms() / PROFILE_TRACED, step_ms = u->ms / u->steps;
    logger_profile(l, "sum of kernel times / step time: %.3f (%.3f of %.3f ms, mean of %d steps)",
                   sum_ms / step_ms, sum_ms, step_ms, u->steps);
    logger_profile(l, "time with a kernel running / time of these steps: %.3f (%.3f of %.3f ms)",
                   span_ms > 0 ? busy_ms / span_ms : 0, busy_ms, span_ms);
    if (u->ms > 1e3 && u->joules > 0) // in less the counter moves too seldom
        logger_profile(l, "energy of a step: %.1f J, %.0f W (this GPU, mean of %d steps)",
                       u->joules / u->steps, 1e3 * u->joules / u->ms, u->steps);
    if (several_ranks)
        logger_profile(l, "exposed communication: %.3f ms a step, in which nothing but collectives ran",
                       profile_exposed_ms() / PROFILE_TRACED);
}

void profile_check_energy(void)
{
    if (isnan(backend_energy()))
        fatal(EXIT_USAGE,
              "--profile-energy: this device does not tell its energy: GPUs since Volta do, where "
              "the driver's libnvidia-ml.so.1 is found");
    if (comm_size() > 1)
        fatal(EXIT_USAGE, "--profile-energy: %d ranks share the run; give --gpus 1", comm_size());
}

void profile_report_energy(Logger *l, Trainer *t, double seconds, const char *reason)
{
    char *line;
    if (!reason && trainer_has_untied(t))
        reason = "tied parameters are untied after it";
    if (reason) {
        logger_message(l, "--profile-energy: no op is measured after step %d: %s", t->step, reason);
        return;
    }
    trainer_record_ops(t);
    profile_energy(t->stream, seconds);
    logger_profile(l, "energy: ops of step %d, each %g s alone", t->step, seconds);
    for (int i = 0; (line = profile_energy_line(i)); i++) {
        logger_profile(l, "%s", line);
        free(line);
    }
}
