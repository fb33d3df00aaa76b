// 8-bit conversions: every code of both formats, and rounding against a search over all values.
#include "llmc/cpu/fp8.h"
#include "dev/test/tap.h"
#include "dev/test/ops_reference.h"

typedef struct {
    const char *name;
    int fraction, bias, largest; // code of the largest finite value
    float max;
    uint8_t (*to)(float);
    float (*from)(uint8_t);
    double (*nearest)(double);
} Format;

static const Format formats[] = {
    {"e4m3", 3, 7, 0x7e, 448, float_to_e4m3, e4m3_to_float, ref_e4m3},
    {"e5m2", 2, 15, 0x7b, 57344, float_to_e5m2, e5m2_to_float, ref_e5m2},
};

// The value a code has by the definition of the format.
static double value_of(const Format *f, int code)
{
    int magnitude = code & 0x7f, exponent = magnitude >> f->fraction,
        bits = magnitude & ((1 << f->fraction) - 1);
    double v = exponent ? ldexp(1 + ldexp(bits, -f->fraction), exponent - f->bias)
                        : ldexp(bits, 1 - f->bias - f->fraction);
    return code & 0x80 ? -v : v;
}

static void test_codes(const Format *f)
{
    int wrong_value = 0, wrong_trip = 0, special = 0;
    for (int code = 0; code < 256; code++) {
        float v = f->from((uint8_t)code);
        if ((code & 0x7f) > f->largest) {
            bool infinity = f->fraction == 2 && (code & 0x7f) == 0x7c;
            special += infinity ? isinf(v) && !!signbit(v) == code >> 7 : isnan(v);
            continue;
        }
        wrong_value += v != value_of(f, code) || !!signbit(v) != code >> 7;
        wrong_trip += f->to(v) != code;
    }
    ok(wrong_value == 0, "%s: every finite code has its value (%d wrong)", f->name, wrong_value);
    ok(wrong_trip == 0, "%s: every finite code survives a round trip (%d wrong)", f->name, wrong_trip);
    ok(special == 2 * (0x7f - f->largest), "%s: infinities and NaNs decode as such", f->name);
}

// All halfway points and their fp32 neighbours: where nearest-even can go wrong.
static void test_edges(const Format *f)
{
    int wrong = 0, tried = 0;
    for (int code = 0; code < f->largest; code++) {
        float middle = (float)((value_of(f, code) + value_of(f, code + 1)) / 2);
        float points[] = {middle, nextafterf(middle, 0), nextafterf(middle, INFINITY)};
        for (int i = 0; i < 6; i++, tried++) {
            float x = i < 3 ? points[i] : -points[i - 3];
            float got = f->from(f->to(x));
            wrong += got != f->nearest(x) || !signbit(got) != !signbit(x);
        }
    }
    ok(wrong == 0, "%s: ties go to the even code, neighbours of ties to the nearest (%d of %d wrong)",
       f->name, wrong, tried);
}

static void test_random(const Format *f)
{
    int wrong = 0;
    for (int i = 0; i < 20000; i++) {
        float x = (float)(uniform(-2, 2) * exp2(uniform(-22, 17)));
        wrong += f->from(f->to(x)) != f->nearest(x);
    }
    ok(wrong == 0, "%s: 20000 values of all sizes go to the nearest (%d wrong)", f->name, wrong);
}

static void test_extremes(const Format *f)
{
    float step = f->max / (f->fraction == 3 ? 14 : 7); // spacing at the top
    ok(f->from(f->to(f->max)) == f->max && f->from(f->to(-f->max)) == -f->max,
       "%s: the largest value is kept", f->name);
    ok(f->from(f->to(nextafterf(f->max, INFINITY))) == f->max && f->from(f->to(f->max + step)) == f->max,
       "%s: above the largest saturates", f->name);
    ok(f->from(f->to(3.4e38f)) == f->max && f->from(f->to(INFINITY)) == f->max &&
           f->from(f->to(-INFINITY)) == -f->max,
       "%s: huge values and infinities saturate", f->name);
    ok(isnan(f->from(f->to(NAN))) && isnan(f->from(f->to(-NAN))), "%s: NaN stays NaN", f->name);
    ok(f->to(0.0f) == 0x00 && f->to(-0.0f) == 0x80, "%s: both zeros keep their sign", f->name);
    ok(f->to(1e-40f) == 0x00 && f->to(-1e-40f) == 0x80, "%s: fp32 subnormals go to zero with their sign",
       f->name);
    float least = (float)value_of(f, 1);
    ok(f->from(f->to(least / 2)) == 0 && f->from(f->to(nextafterf(least / 2, 1))) == least &&
           f->from(f->to(least * 1.5f)) == 2 * least,
       "%s: around the smallest subnormal", f->name);
}

int main(void)
{
    for (int i = 0; i < 2; i++) {
        PART(test_codes(&formats[i]));
        PART(test_edges(&formats[i]));
        PART(test_random(&formats[i]));
        PART(test_extremes(&formats[i]));
    }
    return tap_done();
}
