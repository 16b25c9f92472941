// Remembered: the last calls of a thread that were checked. A call like one of them, at any addresses, needs no second check:
// the declarations are compared letter by letter, 1 to 2 us when the caches have just held a state of megabytes; comparing the
// bytes of the arguments takes a tenth of that.
//
// What a check reads beyond the arguments' bytes keeps a call from being remembered (values of offsets, lengths, positive
// numbers, ...) or is done again (Op::check, addresses that are null, the environment's choice of an implementation).
#pragma once

#include "op.h"

namespace linnet {

struct Remembered {
  static constexpr size_t kMostArgs = 2048, kMostOut = 640;  // larger structs are not remembered

  const Op* op = nullptr;
  bool packed_rank = false;
  Dims dims;
  char asked[kMostArgs], prepared[kMostArgs];  // the arguments before and after prepare(), without addresses
  // The last forward run of such arguments; impl is null when there was none.
  const Impl* impl = nullptr;
  int workers = 0;
  int64_t workspace = 0;
  char asked_out[kMostOut], prepared_out[kMostOut];

  // The call that had these arguments, which become prepared ones; null, and nothing changed, when there is none.
  static Remembered* recall(const Op& op, void* args);
  // Called with the arguments before and after prepare(); null when they are not to be remembered.
  static Remembered* remember(const Op& op, const void* asked, const void* prepared, const Dims& dims, bool packed_rank);

  // The same for the results of a forward run.
  bool recall_out(void* out) const;
  void remember_out(const void* asked_results, const void* prepared_results, const Impl* chosen, int of_workers, int64_t bytes);
};

}  // namespace linnet
