// What a kernel gets besides its tensors: who runs its tasks, and memory it asked for in advance.
#pragma once

#include "executor.h"
#include "view.h"

namespace linnet {

struct Launch {
  Executor* executor = nullptr;
  char* workspace = nullptr;  // 128-byte aligned; uninitialised
  int workers = 1;            // executor->workers()
  // On a GPU: the stream to enqueue on (a CUstream), and where a failure is told; the workspace is in the GPU's memory.
  void* stream = nullptr;
  const char** error = nullptr;
};

// Cuts a workspace in pieces. Run the same cuts on a null arena to learn how many bytes they need:
//
//   template <class T> struct Scratch { T* state; T* scores; };
//   Scratch<T> cut(Arena& arena) { return {arena.take<T>(K * V), arena.take<T>(C * C)}; }
class Arena {
 public:
  LINNET_INLINE explicit Arena(char* base = nullptr) : base_(base) {}
  template <class T>
  LINNET_INLINE T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base_) + static_cast<uintptr_t>(used_));  // base_ may be null
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 127) / 128 * 128;  // neighbours never share a cache line
    return piece;
  }
  LINNET_INLINE int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace linnet
