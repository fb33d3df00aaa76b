// The secret that the ranks of a run share, and proofs of knowing it: HMAC-SHA256 of libsodium over random
// numbers of both sides.
//
// Whoever starts ranks on several machines gives all of them the same TRAIN_GPT_SECRET (scripts/multi_node*
// make one for each run). Without it, or without libsodium, ranks meet on one machine only, and only those of
// one user (meeting.h).
#pragma once
#include "llmc/base/common.h"

enum { NONCE_BYTES = 32, PROOF_BYTES = 32, SECRET_LEAST = 16 };

// Takes TRAIN_GPT_SECRET out of the environment, so that no program that this one runs gets it. False with a
// line when it cannot be used: too short, or libsodium is missing.
bool secret_take(Error *e);
bool secret_known(void);
bool secret_supported(void); // built with libsodium

void secret_nonce(uint8_t *nonce); // NONCE_BYTES random bytes
// Who says so (`role`, which keeps one side's proof from being the other's) and what was said. proof:
// PROOF_BYTES; zeros without a secret.
void secret_prove(uint8_t *proof, const char *role, const void *said, size_t bytes);
// Takes the same time for every wrong proof.
bool secret_is_proved(const uint8_t *proof, const char *role, const void *said, size_t bytes);
