#include "emulate/machine.h"

#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "emulate/hopper.h"
#include "emulate/launch.h"

namespace linnet::emulate {

// Saves where this stack stands in *from and goes on at `to`: what the calling convention keeps over calls is on the stacks.
extern "C" void linnet_switch_stack(void** from, void* to);
asm(R"(
.text
.type linnet_switch_stack, @function
linnet_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

constexpr int kDynamicBytes = 256 * 1024;  // more than any GPU has
alignas(4096) char linnet_emulated_shared[kDynamicBytes];

struct Pending {
  struct Copy {
    uint32_t to;
    const void* from;
    uint32_t bytes, size;
    int group;
  };
  std::vector<Copy> copies;
  int group = 0;  // that is being filled
};

namespace {

constexpr int kMostThreads = 1024, kPage = 4096;
constexpr int kWatched = 4096;  // bytes behind a block's shared memory that must stay as they are
enum State { kReady, kWaiting, kEnded };

struct Meeting {
  uint32_t mask = 0, arrived = 0;
  unsigned turn = 0;
  const char* kind = nullptr;
  Slot slots[2][32];
};
struct Warp {
  uint32_t exists = 0, live = 0;  // lanes of it, and those that have not ended
  std::vector<Meeting> meetings;  // one for each mask
};
struct Barrier {
  std::vector<Thread*> waiting;
  int threads = 0, yes = 0;
  int arrived = 0;  // who does not wait
  unsigned turn = 0;
  int said[2] = {};
};

}  // namespace

struct Block {
  const LaunchOf* launch = nullptr;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::deque<Thread*> ready;
  int live = 0;
  void* stack = nullptr;  // of the one who runs threads
  uint64_t pauses = 0;    // since a thread last did anything else
};

namespace {

Block block;
Thread* running = nullptr;
char* stacks = nullptr;
bool backwards = false;
struct Static {  // shared memory that kernels declare with a size: variables of the thread, so that they lie together
  char* data = nullptr;
  size_t bytes = 0;
};
Static statics;

Thread& thread_at(int i) { return *reinterpret_cast<Thread*>(stacks + static_cast<size_t>(i) * kStackBytes); }

int linear(const Thread& t) { return static_cast<int>(t.thread.x); }

void say_where(const char* what) {
  char text[512];
  const Thread* t = running;
  const int length =
      t == nullptr ? snprintf(text, sizeof text, "emulated GPU: %s\n", what)
                   : snprintf(text, sizeof text, "emulated GPU: %s, block (%u, %u, %u) of (%u, %u, %u), thread %u of %u: %s\n",
                              block.launch->name, t->block.x, t->block.y, t->block.z, t->grid.x, t->grid.y, t->grid.z,
                              t->thread.x, t->threads.x, what);
  if (write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) _exit(1);
}

void on_signal(int signal, siginfo_t* info, void*) {
  char text[160];
  if (signal == SIGILL) {
    snprintf(text, sizeof text, "an access that its type does not allow: misaligned, or behind the end of an array");
  } else {
    snprintf(text, sizeof text, "an access outside of memory at %p", info->si_addr);
  }
  say_where(text);
  _exit(1);
}

void prepare_stacks() {
  if (stacks != nullptr) return;
  const size_t bytes = (kMostThreads + 1) * kStackBytes;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory for the stacks of threads");
  const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + kStackBytes - 1) & ~(kStackBytes - 1);
  stacks = reinterpret_cast<char*>(first);
  for (int i = 0; i < kMostThreads; ++i) mprotect(stacks + static_cast<size_t>(i) * kStackBytes + kPage, kPage, PROT_NONE);
  const char* order = getenv("LINNET_EMULATE_ORDER");
  backwards = order != nullptr && std::string(order) == "backwards";
  static char alternate[64 * 1024];
  stack_t other = {};
  other.ss_sp = alternate;
  other.ss_size = sizeof alternate;
  sigaltstack(&other, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL}) sigaction(signal, &action, nullptr);
}

// The thread-local variables of the image that holds this address.
struct Wanted {
  const void* address;
  Static found;
};
int look_at_object(dl_phdr_info* info, size_t, void* data) {
  auto& wanted = *static_cast<Wanted*>(data);
  const auto address = reinterpret_cast<uintptr_t>(wanted.address);
  bool here = false;
  size_t bytes = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type == PT_LOAD && address - info->dlpi_addr - part.p_vaddr < part.p_memsz) here = true;
    if (part.p_type == PT_TLS) bytes = part.p_memsz;
  }
  if (here && bytes != 0) wanted.found = {static_cast<char*>(info->dlpi_tls_data), bytes};
  return here;
}

void stop() { linnet_switch_stack(&running->stack, block.stack); }

void finish_barrier(Barrier& b) {
  b.said[b.turn & 1] = b.yes;
  ++b.turn;
  b.threads = b.yes = b.arrived = 0;
  std::sort(b.waiting.begin(), b.waiting.end(), [](const Thread* x, const Thread* y) { return (x < y) != backwards; });
  for (Thread* t : b.waiting) wake(t);
  b.waiting.clear();
}

void finish_meeting(Meeting& m, int first, Together together) {
  Slot* slots = m.slots[m.turn & 1];
  for (int i = 0; i < 32; ++i) {
    if ((m.arrived >> i & 1) == 0) std::memset(&slots[i], 0xff, sizeof(Slot));
  }
  if (together != nullptr) together(slots, m.arrived);
  const uint32_t arrived = m.arrived;
  m.arrived = 0;
  m.kind = nullptr;
  ++m.turn;
  for (int i = 0; i < 32; ++i) {
    const int lane = backwards ? 31 - i : i;
    if ((arrived >> lane & 1) == 0) continue;
    Thread& t = thread_at(first + lane);
    if (&t != running) wake(&t);
  }
}

// A thread that ends no longer keeps the others waiting.
void end_thread() {
  Thread& me = *running;
  const int index = linear(me), lane = index % 32;
  wait_copies(0);
  end_hopper_thread();
  me.state = kEnded;
  --block.live;
  Warp& warp = block.warps[static_cast<size_t>(index / 32)];
  warp.live &= ~(1u << lane);
  for (Meeting& m : warp.meetings) {
    if (m.arrived != 0 && m.arrived == (m.mask & warp.live)) fail("it ended while the lanes of its warp wait for it");
  }
  Barrier& all = block.barriers[0];
  if (!all.waiting.empty() && all.threads == 0 && static_cast<int>(all.waiting.size()) == block.live) finish_barrier(all);
  stop();
}

void run_thread() {
  block.launch->call(block.launch->parameters);
  end_thread();
}

void start_thread(int i, const LaunchOf& launch, Index at) {
  Thread& t = thread_at(i);
  Pending* copies = t.copies;
  if (copies == nullptr) copies = new Pending;
  copies->copies.clear();
  copies->group = 0;
  t = {{static_cast<unsigned>(i), 0, 0}, at, launch.grid, launch.threads, &block, copies, nullptr, kReady};
  auto* top = reinterpret_cast<void**>(reinterpret_cast<char*>(&t) + kStackBytes);
  *--top = nullptr;  // where a caller's address would be: the stack is a multiple of 16 before a call
  *--top = reinterpret_cast<void*>(&run_thread);
  for (int r = 0; r < 6; ++r) *--top = nullptr;
  t.stack = top;
}

void run_block(const LaunchOf& launch, Index at) {
  const int threads = static_cast<int>(launch.threads.x);
  block.launch = &launch;
  block.live = threads;
  block.ready.clear();
  block.pauses = 0;
  block.warps.assign(static_cast<size_t>((threads + 31) / 32), {});
  for (Barrier& b : block.barriers) b = {};
  begin_hopper_block();
  if (statics.bytes != 0) std::memset(statics.data, 0xff, statics.bytes);
  std::memset(linnet_emulated_shared, 0xff, static_cast<size_t>(launch.shared_bytes) + kDynamicStart + kWatched);
  for (int i = 0; i < threads; ++i) {
    start_thread(i, launch, at);
    Warp& warp = block.warps[static_cast<size_t>(i / 32)];
    warp.exists = warp.live |= 1u << (i % 32);
  }
  for (int i = 0; i < threads; ++i) block.ready.push_back(&thread_at(backwards ? threads - 1 - i : i));
  while (!block.ready.empty()) {
    running = block.ready.front();
    block.ready.pop_front();
    linnet_switch_stack(&block.stack, running->stack);
  }
  if (block.live != 0) {
    std::string text = "threads wait for each other:";
    int shown = 0;
    for (const Warp& warp : block.warps) {
      for (const Meeting& m : warp.meetings) {
        if (m.arrived != 0 && shown++ < 4) text += std::string(" lanes of one warp at ") + m.kind + ";";
      }
    }
    for (int i = 0; i < 16; ++i) {
      const size_t count = block.barriers[i].waiting.size();
      if (count != 0) text += " " + std::to_string(count) + " threads at barrier " + std::to_string(i) + ";";
    }
    text += hopper_waits();
    fail(text.c_str());
  }
  end_hopper_block();
  const char* end = linnet_emulated_shared + kDynamicStart + launch.shared_bytes;
  const char* last = end + kWatched;
  if (std::any_of(end, last, [](char c) { return c != static_cast<char>(0xff); })) {
    fail("the block wrote behind the shared memory that it was launched with");
  }
  running = nullptr;
}

}  // namespace

void fail(const char* sentence) {
  say_where(sentence);
  _exit(1);
}

void run(const LaunchOf& launch) {
  prepare_stacks();
  if (launch.shared_bytes > kDynamicBytes - kDynamicStart - kWatched || launch.threads.x > kMostThreads ||
      launch.threads.y * launch.threads.z != 1) {
    fail("a launch that no GPU takes");
  }
  launch.touch();
  Wanted wanted{reinterpret_cast<const void*>(launch.call), {}};
  dl_iterate_phdr(look_at_object, &wanted);
  statics = wanted.found;
  const uint64_t count = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t n = backwards ? count - 1 - i : i;
    run_block(launch, {static_cast<unsigned>(n % launch.grid.x), static_cast<unsigned>(n / launch.grid.x % launch.grid.y),
                       static_cast<unsigned>(n / launch.grid.x / launch.grid.y)});
  }
}

const Slot* meet(const char* kind, uint32_t mask, const Slot& mine, Together together) {
  Thread& me = *running;
  const int index = linear(me), lane = index % 32;
  Warp& warp = block.warps[static_cast<size_t>(index / 32)];
  if ((mask >> lane & 1) == 0) fail("it is not in the mask that it names");
  if ((mask & warp.exists & ~warp.live) != 0) fail("it waits for lanes of its warp that have ended");
  block.pauses = 0;
  size_t which = 0;
  while (which < warp.meetings.size() && warp.meetings[which].mask != mask) ++which;
  if (which == warp.meetings.size()) {
    warp.meetings.reserve(64);
    if (which == 64) fail("one warp meets with more than 64 different masks");
    warp.meetings.emplace_back().mask = mask;
  }
  Meeting& m = warp.meetings[which];
  if (m.kind != nullptr && std::strcmp(m.kind, kind) != 0) fail("lanes of one warp are at different instructions of the warp");
  m.kind = kind;
  const Slot* slots = m.slots[m.turn & 1];
  m.slots[m.turn & 1][lane] = mine;
  m.arrived |= 1u << lane;
  if (m.arrived == (mask & warp.live)) {
    finish_meeting(m, index / 32 * 32, together);
  } else {
    me.state = kWaiting;
    stop();
  }
  return slots;
}

void wake(Thread* thread) {
  thread->state = kReady;
  block.ready.push_back(thread);
}
void sleep() {
  block.pauses = 0;
  running->state = kWaiting;
  stop();
}
bool runs_backwards() { return backwards; }

static bool is_complete(const Barrier& b, int threads) {
  return static_cast<int>(b.waiting.size()) + b.arrived == (threads == 0 ? block.live : threads);
}
static int wait_at(int id, int threads, bool mine) {
  Barrier& b = block.barriers[id];
  Thread& me = *running;
  block.pauses = 0;
  if ((!b.waiting.empty() || b.arrived != 0) && b.threads != threads) fail("threads name one barrier with different counts");
  b.threads = threads;
  b.yes += mine ? 1 : 0;
  const unsigned turn = b.turn;
  b.waiting.push_back(&me);
  if (is_complete(b, threads)) finish_barrier(b);
  if (me.state == kReady && b.turn == turn) me.state = kWaiting;
  stop();
  return b.said[turn & 1];
}
bool barrier(int id, int threads, bool mine) { return wait_at(id, threads, mine) != 0; }
int barrier_count(bool mine) { return wait_at(0, 0, mine); }
void barrier_arrive(int id, int threads) {
  Barrier& b = block.barriers[id];
  if ((!b.waiting.empty() || b.arrived != 0) && b.threads != threads) fail("threads name one barrier with different counts");
  b.threads = threads;
  ++b.arrived;
  if (is_complete(b, threads)) finish_barrier(b);
}

void pause() {
  if (++block.pauses > 100'000'000) fail("it waits for what never comes");
  wake(running);
  stop();
}

void copy_later(uint32_t to, const void* from, uint32_t bytes, uint32_t size) {
  if (to % size != 0 || reinterpret_cast<uintptr_t>(from) % size != 0)
    fail("a copy between addresses that are no multiples of its size");
  Pending& p = *running->copies;
  p.copies.push_back({to, from, bytes, size, p.group});
}
void commit_copies() { ++running->copies->group; }
void wait_copies(int pending) {
  Pending& p = *running->copies;
  size_t kept = 0;
  for (const Pending::Copy& c : p.copies) {
    if (c.group >= p.group - pending) {
      p.copies[kept++] = c;
      continue;
    }
    char* to = static_cast<char*>(shared_pointer(c.to, c.size));
    std::memset(to, 0, c.size);
    if (c.bytes != 0) std::memcpy(to, c.from, c.bytes);
  }
  p.copies.resize(kept);
}

// Dynamic shared memory comes first, as on a GPU it does not; far behind it what kernels declare with a size.
constexpr uint32_t kStaticAddress = 0x1000000;
uint32_t shared_address(const void* pointer) {
  const char* p = static_cast<const char*>(pointer);
  if (p >= linnet_emulated_shared && p <= linnet_emulated_shared + kDynamicBytes) {
    return static_cast<uint32_t>(p - linnet_emulated_shared);
  }
  if (p < statics.data || p > statics.data + statics.bytes) fail("an address that is not in shared memory is taken for one");
  return kStaticAddress + static_cast<uint32_t>(p - statics.data);
}
void* shared_pointer(uint32_t address, uint32_t bytes) {
  if (address >= kStaticAddress) {
    if (address - kStaticAddress + bytes > statics.bytes) fail("an address outside of shared memory");
    return statics.data + (address - kStaticAddress);
  }
  if (address < kDynamicStart || address - kDynamicStart + bytes > static_cast<uint32_t>(block.launch->shared_bytes)) {
    fail("an address outside of the block's shared memory");
  }
  return linnet_emulated_shared + address;
}

}  // namespace linnet::emulate
