// The emulated GPU as kernels see it: the thread that runs, and where threads meet. For tests alone (docs/emulate.md).
//
// Every CUDA thread is a fiber with a stack of its own; the blocks of a launch run one after the other. A thread runs until it
// must wait for others, and they run in an order that LINNET_EMULATE_ORDER chooses: what one thread reads before another has
// written it differs between orders.
#pragma once

#include <cstddef>
#include <cstdint>

namespace linnet::emulate {

struct Index {
  unsigned x, y, z;
};

// What a lane brings to a meeting of its warp, and finds there.
union Slot {
  uint32_t word[16];
  uint64_t wide[8];
  float number[16];
};

struct Block;
struct Pending;

// At the low end of the stack, which is aligned to its size: so a thread finds itself by its stack pointer.
struct Thread {
  Index thread;
  Index block, grid, threads;  // blockIdx, gridDim, blockDim
  Block* of;
  Pending* copies;  // that were asked for and not waited for
  void* stack;      // where it stopped
  int state;
};
inline constexpr uintptr_t kStackBytes = 256 * 1024;

inline Thread& self() {
  uintptr_t stack;
  asm("mov %%rsp, %0" : "=r"(stack));
  return *reinterpret_cast<Thread*>(stack & ~(kStackBytes - 1));
}

// All lanes of `mask` come here with `mine`; the last of them runs `together` (null: nothing) on everybody's slots, 32 of them.
// What a lane outside of the mask, or one that has ended, would have brought is all ones. `kind` names the meeting: lanes that
// come to different ones are told.
using Together = void (*)(Slot* slots, uint32_t present);
const Slot* meet(const char* kind, uint32_t mask, const Slot& mine, Together together);

// A barrier of `threads` threads of the block, 0: of all that have not ended. Whether any of them says so.
bool barrier(int id, int threads, bool mine);
int barrier_count(bool mine);              // the same for all, and how many of them say so
void barrier_arrive(int id, int threads);  // counts as one of the threads, and does not wait
void pause();                              // lets the others run
void sleep();                              // until another thread wakes this one
void wake(Thread* thread);
bool runs_backwards();  // LINNET_EMULATE_ORDER

// Copies to shared memory that run by themselves: not before they are waited for.
void copy_later(uint32_t to, const void* from, uint32_t bytes, uint32_t size);
void commit_copies();
void wait_copies(int pending);

// Hopper's (hopper.cc). Barriers in shared memory, of 8 bytes: arrivals and bytes complete a phase.
void phases_init(void* barrier, uint32_t count);
void phases_arrive(void* barrier, uint32_t bytes);  // `bytes` more are expected
void phases_wait(void* barrier, uint32_t parity);
// What the driver makes of a tensor for the copy engine, in the 128 bytes of a tensor map. Strides in bytes.
struct TensorBox {
  static constexpr uint32_t kMark = 0x786f62;
  uint32_t mark, element;
  const void* data;
  uint64_t size[5], stride[5];
  uint16_t box[5];
  bool is_swizzled;
};
static_assert(sizeof(TensorBox) <= 128);
void load_box_later(void* to, const void* map, void* barrier, const int (&at)[5]);
void load_bytes_later(void* to, const void* from, uint32_t bytes, void* barrier);
void store_bytes_later(void* to, const void* from, uint32_t bytes);
void finish_stores();
// wgmma, D [64, n] (+)= A B: a thread's part of it.
enum class ProductType : uint8_t { bf16, f16, tf32 };
struct Product {
  float* d;
  uint32_t n;
  ProductType type;
  bool add, a_in_registers, a_transposed, b_transposed;
  uint32_t registers[4];  // A, or a descriptor of it
  uint64_t a, b;
};
void issue_product(const Product& product);
void commit_products();
void wait_products(int pending);

// Addresses in shared memory as 32-bit numbers.
uint32_t shared_address(const void* pointer);
void* shared_pointer(uint32_t address, uint32_t bytes);

[[noreturn]] void fail(const char* sentence);  // the kernel that runs, its block and its thread are told with it

// Dynamic shared memory lies here, from this byte on: no multiple of 1024, as behind other variables.
extern "C" char linnet_emulated_shared[];
inline constexpr int kDynamicStart = 16;

}  // namespace linnet::emulate
