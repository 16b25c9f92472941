// Barriers, fences and registers: one function per instruction.
#pragma once

#include <cstdint>

namespace linnet::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Dynamic shared memory as a T, from its first multiple of 1024 on. By an offset: through an integer the compiler would lose
// that it is shared memory, and take generic loads for everything in it.
template <class T>
__device__ __forceinline__ T& shared_as(char* memory) {
  return *reinterpret_cast<T*>(memory + (-shared_address(memory) & 1023));
}

// mbarrier: `count` arrivals (and the bytes expected) complete a phase; waiters name the parity of the phase they wait for.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni finished;\n"
      "bra.uni again;\n"
      "finished:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// A counter in global memory; what its writer wrote before it is seen behind this load.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* counter) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}

// True in one thread of the warp, all of which are here. What it decides needs no loop over threads: the compiler knows of one.
__device__ __forceinline__ bool elect() {
  uint32_t is;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}\n" : "=r"(is));
  return is != 0;
}

// Named barriers of a part of the block; `id` 1 to 15 as a constant, else ptxas reserves all 16.
template <int id, int threads>
__device__ __forceinline__ void group_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(id), "n"(threads) : "memory");
}

// Counts as one of the threads that the barrier waits for, and goes on.
template <int id, int threads>
__device__ __forceinline__ void group_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(id), "n"(threads) : "memory");
}

// The same as group_sync, and whether any of the threads says so.
template <int id, int threads>
__device__ __forceinline__ bool group_any(bool mine) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "bar.red.or.pred any, %2, %3, mine;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(mine)), "n"(id), "n"(threads)
      : "memory");
  return any != 0;
}

// Ordinary writes to shared memory become visible to wgmma and the copy engine; in every writing thread, before the barrier.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same number, but nothing that was computed from it before: addresses that follow from it are computed anew behind this
// point. Where registers are short they would otherwise be kept.
__device__ __forceinline__ void forget(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void forget(uint32_t& x) { asm volatile("" : "+r"(x)); }

// Registers per thread of this warpgroup from here on.
template <int count>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

}  // namespace linnet::ptx
