// How ranks that something else has started find each other, prove who they are, and get their control
// channel.
//
// With a secret (llmc/dist/secret.h) rank 0 listens on the one interface that MASTER_ADDR names. Both sides
// prove that they know the secret before either believes anything that the other says:
//
//   rank to rank 0   Hello      a random number
//   rank 0 to rank   Challenge  another one, and HMAC(secret, "rank 0", both numbers)
//   rank to rank 0   Identity   who it is, what it runs, and HMAC(secret, "rank", both numbers, all that)
//   rank 0 to rank   Verdict    when all are there: welcome, or refused
//
// Whoever says something else, or nothing, is dropped and counted, and the meeting goes on. A rank that has
// proved who it is and runs something else than rank 0 ends the run with one line. Without a secret there is
// no network: ranks meet on a socket of this machine, and both sides ask the system whether the other belongs
// to the same user.
//
// Not protected: what goes over the connections after that is neither encrypted nor signed. The secret keeps
// out whoever can reach the port; it does not keep out whoever can read or change packets on their way. That
// takes a network of one's own.
#pragma once
#include "llmc/dist/rendezvous.h"

// Connects the control channel of all ranks, or ends with one line: no answer within `timeout` seconds, the
// port taken, two programs on one port, ranks of another program or with other options, a secret that is
// missing or wrong.
//   program, options  hashes that must be the same on all ranks
void meet_ranks(const Rendezvous *r, uint64_t program, uint64_t options, double timeout, Control *c);
