// Remembered: the last calls of a thread that were checked. A call like one of them, at any addresses, needs no second check:
// the declarations are compared letter by letter, 1 to 2 us when the caches have just held a state of megabytes. And it needs
// no copy of its arguments: the kernel reads the prepared ones here, whose lines the other cores still hold from the last time.
//
// What a check reads beyond shapes and options keeps a call from being remembered (values of offsets, lengths, positive
// numbers, ...) or is done again (Op::check, addresses that are null or odd, the environment's choice of an implementation).
#pragma once

#include "core/op.h"

namespace linnet {

struct Remembered {
  static constexpr size_t kMostArgs = 2048, kMostOut = 640;  // larger structs are not remembered
  static constexpr size_t kMostTensors = 16;

  // A struct of tensors and options: as it was asked, and after its check.
  template <size_t kBytes>
  struct Part {
    size_t bytes = 0;
    int tensors = 0;
    uint16_t at[kMostTensors];  // where the tensors lie, ascending
    alignas(std::max_align_t) char asked[kBytes];
    alignas(std::max_align_t) char prepared[kBytes];
  };

  const Op* op = nullptr;
  uint64_t serial = 0;  // of the declaration: another one may stand at the address of one that is gone
  bool packed_rank = false;
  bool running = false;  // a kernel reads it: a call that it makes itself takes another one
  Dims dims;
  Part<kMostArgs> args;
  // The last forward run of such arguments; impl is null when there was none.
  const Impl* impl = nullptr;
  int workers = 0;
  int64_t workspace = 0;
  Part<kMostOut> out;

  // The call that had these arguments, prepared at the addresses of these; null when there is none.
  static Remembered* recall(const Op& op, const void* asked);
  // Called with the arguments before and after prepare(); null when they are not to be remembered.
  static Remembered* remember(const Op& op, const void* asked, const void* prepared, const Dims& dims, bool packed_rank);

  // The same for the results of a forward run by so many workers.
  bool recall_out(const void* asked, int of_workers);
  void remember_out(const void* asked, const void* prepared, const Impl* chosen, int of_workers, int64_t bytes);

  void run(const Launch& launch) {
    struct Running {
      bool& flag;
      explicit Running(bool& f) : flag(f) { flag = true; }
      ~Running() { flag = false; }
    } const now(running);
    impl->forward(args.prepared, out.prepared, launch);
  }
};

}  // namespace linnet
