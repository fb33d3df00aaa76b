// Newton-Schulz orthogonalisation: coefficients and options.
#include "llmc/optim/newton_schulz.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- coefficients -----------------------------------------------------------------------------------------

// kj      Keller Jordan's Muon: steep at 0, never settles at 1
// you     You Jiacheng's, tuned on the spread of outputs
// polar   polar_express(5, 1e-3, 0.02, 0.02); input divided by 1.02 |U|_F, for inputs above 1.04 blow up
// dao     polar_express(5, 1e-3, 0, 0.02407327424182761), then every tuple, the last too, as p(x / 1.05)
// ga      found for AOL-scaled Gaussian matrices by a genetic search (flash-newton-schulz)
// hybrid  8 steep steps, then 2 that converge
typedef struct {
    const char *name;
    int count, aol_count; // tuples, and how many of them (the last) AOL scaling needs
    double shrink;        // the tuples act on x / shrink
    NsTuple tuples[NS_MAX_STEPS];
} CoefficientSet;

#define KJ \
    { \
        3.4445, -4.7750, 2.0315 \
    }
static const CoefficientSet sets[] = {
    {"kj", 5, 4, 1, {KJ, KJ, KJ, KJ, KJ}},
    {"you",
     5,
     4,
     1,
     {{4.0848, -6.8946, 2.9270},
      {3.9505, -6.3029, 2.6377},
      {3.7418, -5.5913, 2.3037},
      {2.8769, -3.1427, 1.2046},
      {2.8366, -3.0525, 1.2012}}},
    {"polar",
     5,
     4,
     1,
     {{8.156554524902461, -22.48329292557795, 15.878769915207462},
      {4.042929935166739, -2.808917465908714, 0.5000178451051316},
      {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
      {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
      {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}}},
    {"dao",
     5,
     4,
     1.05,
     {{8.28721201814563, -23.595886519098837, 17.300387312530933},
      {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
      {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
      {3.3184196573706015, -2.488488024314874, 0.51004894012372},
      {2.300652019954817, -1.6689039845747493, 0.4188073119525673}}},
    {"ga",
     4,
     4,
     1,
     {{4.6051, -9.6552, 5.6769},
      {4.7505, -6.0861, 2.1790},
      {2.7763, -2.3190, 0.5523},
      {2.4231, -2.2861, 0.8193}}},
    {"hybrid", 10, 10, 1, {KJ, KJ, KJ, KJ, KJ, KJ, KJ, KJ, {2, -1.5, 0.5}, {2, -1.5, 0.5}}},
};
#undef KJ
enum { NUM_SETS = sizeof sets / sizeof *sets };

static NsTuple shrink_tuple(NsTuple t, double by) // p(x) -> p(x / by)
{
    double cube = by * by * by;
    return (NsTuple){t.a / by, t.b / cube, t.c / (cube * by * by)};
}

static double quintic(NsTuple t, double x)
{
    double y = x * x;
    return x * (t.a + y * (t.b + y * t.c));
}

double ns_scalar_map(const NsTuple *tuples, int steps, double x)
{
    for (int i = 0; i < steps; i++)
        x = quintic(tuples[i], x);
    return x;
}

// ---- options ----------------------------------------------------------------------------------------------

static const struct {
    const char *name, *coefficients;
    bool gram, aol;
    uint32_t restarts;
    float kappa, eps; // kappa at least 1: below it the bound on the singular values is lost
} variants[NS_VARIANTS] = {
    [NS_KJ] = {"kj", "kj", false, false, 0, 1, 1e-7f},
    [NS_YOU] = {"you", "you", false, false, 0, 1, 1e-7f},
    [NS_POLAR] = {"polar", "polar", false, false, 0, 1.02f, 1e-6f},
    [NS_GRAM] = {"gram", "polar", true, false, 1u << 2, 1.02f, 1e-6f},
    [NS_TURBO] = {"turbo", "polar", false, true, 0, 1, 0},
    [NS_TURBO_GRAM] = {"turbo-gram", "polar", true, true, 0, 1, 0},
};
static const char *const dtype_names[] = {[NS_BF16] = "bf16", [NS_FP16] = "fp16", [NS_FP32] = "fp32"};

const char *ns_variant_name(NsVariant variant) { return variants[variant].name; }
const char *ns_dtype_name(NsDtype dtype) { return dtype_names[dtype]; }

static bool is_default(const char *text) { return !text || !*text || !strcmp(text, "auto"); }

// Reads "a,b,c;a,b,c;..." into o.
static bool parse_tuples(NsOptions *o, const char *text, Error *e)
{
    const char *p = text;
    for (o->steps = 0;; p++) {
        double v[3];
        for (int k = 0; k < 3; k++) {
            char *end;
            v[k] = strtod(p, &end);
            end += strspn(end, " ");
            bool separated = k < 2 ? *end == ',' : *end == ';' || !*end;
            if (end == p || !isfinite(v[k]) || !separated)
                return error_set(e,
                                 "Newton-Schulz coefficients: \"%s\" is neither a set (kj, you, polar, dao, "
                                 "ga, hybrid) nor tuples of three "
                                 "numbers (a,b,c;a,b,c;...): see character %td",
                                 text, p - text + 1);
            p = k < 2 ? end + 1 : end;
        }
        if (o->steps == NS_MAX_STEPS)
            return error_set(e, "Newton-Schulz coefficients: more than %d tuples", NS_MAX_STEPS);
        o->tuples[o->steps++] = (NsTuple){v[0], v[1], v[2]};
        if (!*p)
            return true;
    }
}

// Sets tuples and steps from a named set or a list; `steps` 0: as many as the set is made for.
static bool choose_tuples(NsOptions *o, const char *text, int steps, Error *e)
{
    const CoefficientSet *set = NULL;
    for (int i = 0; i < NUM_SETS; i++)
        if (!strcmp(sets[i].name, text))
            set = &sets[i];
    int wanted = steps;
    if (set) {
        o->steps = set->count;
        for (int i = 0; i < set->count; i++)
            o->tuples[i] = set->shrink == 1 ? set->tuples[i] : shrink_tuple(set->tuples[i], set->shrink);
        if (!wanted)
            wanted = o->aol ? set->aol_count : set->count;
    } else {
        if (!parse_tuples(o, text, e))
            return false;
        if (!wanted)
            wanted = o->steps;
    }
    if (wanted < 1 || wanted > NS_MAX_STEPS)
        return error_set(e, "Newton-Schulz steps: %d is not within 1 to %d", wanted, NS_MAX_STEPS);
    if (o->aol && wanted < o->steps)
        memmove(o->tuples, o->tuples + o->steps - wanted, (size_t)wanted * sizeof *o->tuples);
    for (int i = o->steps; i < wanted; i++)
        o->tuples[i] = o->tuples[i - 1];
    o->steps = wanted;
    return true;
}

static bool parse_restarts(uint32_t *restarts, const char *text, int steps, Error *e)
{
    *restarts = 0;
    if (!strcmp(text, "none"))
        return true;
    for (const char *p = text;; p++) {
        char *end;
        long after = strtol(p, &end, 10);
        if (end == p || (*end && *end != ','))
            return error_set(
                e, "Newton-Schulz restarts: \"%s\" is neither none nor a list of iterations such as 2 or 1,3",
                text);
        if (after < 1 || after >= steps)
            return error_set(e,
                             "Newton-Schulz restarts: a restart after iteration %ld of %d is not possible; "
                             "choose within 1 to %d",
                             after, steps, steps - 1);
        *restarts |= 1u << after;
        p = end;
        if (!*p)
            return true;
    }
}

// The largest singular value that enters the first tuple: the Frobenius norm and AOL both bound it.
static double largest_input(const NsOptions *o) { return o->aol ? o->aol_gain : 1 / (double)o->kappa; }

// A composition that leaves [0, 3] anywhere on its inputs diverges in training sooner or later; sound sets
// stay below 1.3.
static bool check_bounded(const NsOptions *o, Error *e)
{
    double top = largest_input(o);
    for (int i = 1; i <= 20000; i++) {
        double x = top * i / 20000, y = ns_scalar_map(o->tuples, o->steps, x);
        if (!(fabs(y) <= 3))
            return error_set(e,
                             "Newton-Schulz coefficients: singular value %.4g of the normalised matrix "
                             "(largest possible: %.4g) becomes %.4g; "
                             "choose other tuples, fewer steps%s",
                             x, top, y, o->aol ? " or a smaller AOL gain" : " or a larger safety factor");
    }
    return true;
}

static bool parse_dtype(NsDtype *dtype, const char *text, Error *e)
{
    for (int i = 0; i < 3; i++)
        if (!strcmp(text, dtype_names[i])) {
            *dtype = (NsDtype)i;
            return true;
        }
    return error_set(e, "Newton-Schulz dtype: \"%s\" is none of bf16, fp16, fp32", text);
}

bool ns_options_parse(NsOptions *o, const NsText *text, Error *e)
{
    const char *name = is_default(text->variant) ? "polar" : text->variant;
    int v = 0;
    while (v < NS_VARIANTS && strcmp(variants[v].name, name))
        v++;
    if (v == NS_VARIANTS)
        return error_set(e,
                         "Newton-Schulz variant: \"%s\" is none of kj, you, polar, gram, turbo, turbo-gram",
                         name);
    *o = (NsOptions){.gram = variants[v].gram,
                     .aol = variants[v].aol,
                     .fallback = true,
                     .aol_gain = text->aol_gain == 0 ? 1 : text->aol_gain,
                     .kappa = variants[v].kappa,
                     .eps = variants[v].eps};
#ifdef FLOATX_FP32
    o->dtype = NS_FP32;
#else
    o->dtype = o->gram ? NS_FP16 : NS_BF16; // the small eigenvalues of R need fp16's mantissa
#endif
    if (!is_default(text->dtype) && !parse_dtype(&o->dtype, text->dtype, e))
        return false;
    if (!(o->aol_gain > 0 && o->aol_gain <= 16))
        return error_set(e, "Newton-Schulz AOL gain: %g is not within 0 (excluded) to 16", o->aol_gain);
    if (!choose_tuples(o, is_default(text->coefficients) ? variants[v].coefficients : text->coefficients,
                       text->steps, e))
        return false;
    if (!is_default(text->restarts)) {
        if (!parse_restarts(&o->restarts, text->restarts, o->steps, e))
            return false;
    } else {
        // AOL leaves so little to amplify that fp16 needs no restart, unless it is over-driven.
        bool fragile = o->gram && o->aol && (o->dtype == NS_BF16 || o->aol_gain > 1);
        o->restarts = (fragile ? 1u << 2 : variants[v].restarts) & ((1u << o->steps) - 1);
    }
    return check_bounded(o, e);
}

const char *ns_caution(const NsOptions *o)
{
    if (o->gram && o->dtype == NS_BF16 && !(o->aol && o->restarts))
        return "Newton-Schulz in Gram form with bf16 is inaccurate on ill-conditioned matrices and may "
               "diverge; use fp16";
    if (o->gram && o->dtype == NS_FP16 && !o->aol && !o->restarts && o->steps > 3)
        return "Newton-Schulz in Gram form without a restart amplifies rounding errors; restart after "
               "iteration 2";
    return NULL;
}

char *ns_describe(const NsOptions *o)
{
    char restarts[64] = "none", scaling[64];
    for (int i = 1, used = 0; i < o->steps; i++)
        if (o->restarts >> i & 1)
            used += snprintf(restarts + used, sizeof restarts - (size_t)used, used ? ",%d" : "%d", i);
    if (o->aol)
        snprintf(scaling, sizeof scaling, "AOL scaling, gain %g", o->aol_gain);
    else
        snprintf(scaling, sizeof scaling, "Frobenius norm times %g plus %g", o->kappa, o->eps);
    const char *form = o->gram ? "Gram form, restarts " : "standard form";
    return format_string("%d steps in %s, %s%s, %s, first tuple %g,%g,%g", o->steps, ns_dtype_name(o->dtype),
                         form, o->gram ? restarts : "", scaling, o->tuples[0].a, o->tuples[0].b,
                         o->tuples[0].c);
}
