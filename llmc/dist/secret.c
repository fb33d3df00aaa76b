#include "llmc/dist/secret.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#ifdef HAVE_SODIUM
#include <sodium.h>
#endif

static const char variable[] = "TRAIN_GPT_SECRET";
static char *secret; // NULL: none

bool secret_known(void) { return secret != NULL; }

bool secret_supported(void)
{
#ifdef HAVE_SODIUM
    return true;
#else
    return false;
#endif
}

bool secret_take(Error *e)
{
    const char *text = getenv(variable);
    if (!text)
        return true;
    if (!secret_supported())
        return error_set(e,
                         "%s is set, but this program was built without libsodium: install it and build "
                         "again, or unset the "
                         "variable to run on one machine",
                         variable);
    if (strlen(text) < SECRET_LEAST)
        return error_set(e, "%s has %zu characters, at least %d are needed: openssl rand -hex 32 makes one",
                         variable, strlen(text), SECRET_LEAST);
    secret = xstrdup(text);
    unsetenv(variable);
    return true;
}

void secret_nonce(uint8_t *nonce)
{
    for (size_t done = 0; done < NONCE_BYTES;) {
        ssize_t n = getrandom(nonce + done, NONCE_BYTES - done, 0);
        if (n < 0 && errno != EINTR)
            fatal(EXIT_BAD_INPUT, "the system has no random numbers: %s", strerror(errno));
        if (n > 0)
            done += (size_t)n;
    }
}

#ifdef HAVE_SODIUM
void secret_prove(uint8_t *proof, const char *role, const void *said, size_t bytes)
{
    static_assert(PROOF_BYTES == crypto_auth_hmacsha256_BYTES, "a proof is an HMAC-SHA256");
    crypto_auth_hmacsha256_state state;
    memset(proof, 0, PROOF_BYTES);
    if (!secret)
        return;
    crypto_auth_hmacsha256_init(&state, (const unsigned char *)secret, strlen(secret));
    crypto_auth_hmacsha256_update(&state, (const unsigned char *)role, strlen(role) + 1);
    crypto_auth_hmacsha256_update(&state, said, bytes);
    crypto_auth_hmacsha256_final(&state, proof);
}

bool secret_is_proved(const uint8_t *proof, const char *role, const void *said, size_t bytes)
{
    uint8_t right[PROOF_BYTES];
    secret_prove(right, role, said, bytes);
    return sodium_memcmp(proof, right, PROOF_BYTES) == 0;
}
#else // secret_take has refused a secret: there is nothing to prove
void secret_prove(uint8_t *proof, const char *role, const void *said, size_t bytes)
{
    (void)role, (void)said, (void)bytes;
    memset(proof, 0, PROOF_BYTES);
}

bool secret_is_proved(const uint8_t *proof, const char *role, const void *said, size_t bytes)
{
    (void)proof, (void)role, (void)said, (void)bytes;
    return true;
}
#endif
