// Hopper's instructions on the emulated GPU: barriers in shared memory with phases, the copy engine, products of warpgroups.
//
// They run by themselves, and when nobody knows. So they are done as late as they may be (a copy when its barrier is waited
// for, a product when its group is), or, with LINNET_EMULATE_ORDER=backwards, as early (at once, or when committed): what is
// read before it has come shows in the one order, what is overwritten while it is still read in the other.
#include "emulate/hopper.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <vector>

#include "core/half.h"
#include "emulate/machine.h"

namespace linnet::emulate {
namespace {

// ---- barriers ---------------------------------------------------------------------------------------------------------------

// As the 8 bytes in shared memory. Memory that is no barrier, or was written over, does not carry the mark.
struct Phases {
  uint64_t count : 16, pending : 16;  // arrivals of a phase, and those that it still lacks
  int64_t bytes : 24;                 // that are expected and have not come
  uint64_t parity : 1, mark : 7;
};
static_assert(sizeof(Phases) == 8);
constexpr uint64_t kMark = 0x2a;

struct Waiting {
  const void* barrier;
  Thread* thread;
};
std::vector<Waiting> waiting;

Phases read_barrier(const void* barrier) {
  shared_address(barrier);  // it lies in shared memory
  if (reinterpret_cast<uintptr_t>(barrier) % 8 != 0) fail("a barrier at an address that is no multiple of 8");
  Phases p;
  std::memcpy(&p, barrier, sizeof p);
  if (p.mark != kMark) fail("a barrier that was not initialised, or has been written over");
  return p;
}
void write_barrier(void* barrier, Phases p) {
  if (p.pending != 0 || p.bytes != 0) {
    std::memcpy(barrier, &p, sizeof p);
    return;
  }
  p.pending = p.count;
  p.parity ^= 1;
  std::memcpy(barrier, &p, sizeof p);
  const auto of_this = [&](const Waiting& w) { return w.barrier == barrier; };
  for (const Waiting& w : waiting) {
    if (of_this(w)) wake(w.thread);
  }
  waiting.erase(std::remove_if(waiting.begin(), waiting.end(), of_this), waiting.end());
}
void bytes_came(void* barrier, int64_t bytes) {
  Phases p = read_barrier(barrier);
  p.bytes -= bytes;
  write_barrier(barrier, p);
}

// ---- the copy engine --------------------------------------------------------------------------------------------------------

struct Flight {  // into shared memory
  void* barrier;
  uint32_t to;
  uint32_t bytes;
  const void* from;  // as they lie; null: a box
  TensorBox box;
  std::array<int, 5> at;
  bool has_landed;  // and nobody has waited for it
};
std::deque<Flight> flights;

// The bytes of a row of 128 bytes stand in another order in every one of 8: SWIZZLE_128B.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

void land_box(const Flight& f) {
  const TensorBox& map = f.box;
  std::array<uint32_t, 5> i = {};
  const uint32_t count = map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.box[4];
  for (uint32_t n = 0; n < count; ++n) {
    uint64_t offset = 0;
    bool inside = true;
    for (uint32_t d = 0; d < 5; ++d) {
      const int64_t x = static_cast<int64_t>(f.at[d]) + i[d];
      inside = inside && x >= 0 && x < static_cast<int64_t>(map.size[d]);
      offset += static_cast<uint64_t>(x) * map.stride[d];
    }
    const uint32_t place = f.to + n * map.element;
    char* to = static_cast<char*>(shared_pointer(map.is_swizzled ? swizzled(place) : place, map.element));
    if (inside) {
      std::memcpy(to, static_cast<const char*>(map.data) + offset, map.element);
    } else {
      std::memset(to, 0, map.element);
    }
    for (uint32_t d = 0; d < 5 && ++i[d] == map.box[d]; ++d) i[d] = 0;
  }
}
void land(const Flight& f) {
  if (f.from == nullptr) {
    land_box(f);
  } else {
    std::memcpy(shared_pointer(f.to, f.bytes), f.from, f.bytes);
  }
  bytes_came(f.barrier, f.bytes);
}
// Somebody waits for a phase of this barrier, or has found it complete.
void land_all(const void* barrier, bool only_landed) {
  for (size_t i = 0; i < flights.size();) {
    if (flights[i].barrier != barrier || (only_landed && !flights[i].has_landed)) {
      ++i;
      continue;
    }
    const Flight f = flights[i];
    flights.erase(flights.begin() + static_cast<int64_t>(i));
    if (!f.has_landed) land(f);
  }
}
void depart(Flight f) {
  read_barrier(f.barrier);
  const bool is_waited_for =
      std::any_of(waiting.begin(), waiting.end(), [&](const Waiting& w) { return w.barrier == f.barrier; });
  f.has_landed = runs_backwards() || is_waited_for;
  if (f.has_landed) land(f);
  if (!is_waited_for) flights.push_back(f);
}

struct Store {  // out of shared memory
  void* to;
  uint32_t from, bytes;
};
void run_store(const Store& s) { std::memcpy(s.to, shared_pointer(s.from, s.bytes), s.bytes); }

// ---- products ---------------------------------------------------------------------------------------------------------------

struct Queued {
  Product product;
  int group;
};
// Of each thread of the block.
struct Own {
  std::vector<Queued> products;
  std::vector<Store> stores;
  int group = 0;        // that is being filled
  uint64_t issued = 0;  // products so far
};
std::vector<Own> owns;

Own& mine() {
  const size_t i = self().thread.x;
  if (owns.size() <= i) owns.resize(i + 1);
  return owns[i];
}

uint32_t field(uint64_t descriptor, int first) { return static_cast<uint32_t>(descriptor >> first & 0x3fff) << 4; }
// The address of number k of row (or column) i of an operand that a descriptor names (ptx/layout.h).
uint32_t operand_address(uint64_t descriptor, bool transposed, uint32_t element, uint32_t i, uint32_t k) {
  const uint32_t start = field(descriptor, 0), leading = field(descriptor, 16), stride = field(descriptor, 32);
  const uint64_t swizzle = descriptor >> 62;
  if (swizzle == 0 && !transposed) return start + i / 8 * stride + i % 8 * 16 + k * element / 16 * leading + k * element % 16;
  if (swizzle != 1) fail("a descriptor of a layout that is not known here");
  const uint32_t plain = transposed ? start + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * element
                                    : start + i / 8 * stride + i % 8 * 128 + k * element;
  return swizzled(plain);
}
float number(ProductType type, uint32_t bits) {
  if (type == ProductType::tf32) return __builtin_bit_cast(float, bits & ~0x1fffu);
  if (type == ProductType::bf16) return to_f32(Bf16{static_cast<uint16_t>(bits)});
  return to_f32(F16{static_cast<uint16_t>(bits)});
}
// Rows (or columns) first .. first+count-1 of an operand by its `depth` numbers, put(i, k, number); in pieces of 16 bytes,
// which lie together in every layout.
template <class Put>
void read_operand(const Product& p, uint64_t descriptor, bool transposed, uint32_t first, uint32_t count, uint32_t depth,
                  const Put& put) {
  const uint32_t element = p.type == ProductType::tf32 ? 4 : 2, piece = 16 / element;
  for (uint32_t i = 0; i < count; i += transposed ? piece : 1) {
    for (uint32_t k = 0; k < depth; k += transposed ? 1 : piece) {
      const char* from =
          static_cast<const char*>(shared_pointer(operand_address(descriptor, transposed, element, first + i, k), 16));
      for (uint32_t n = 0; n < piece; ++n) {
        uint32_t bits = 0;
        std::memcpy(&bits, from + n * element, element);
        put(transposed ? i + n : i, transposed ? k : k + n, number(p.type, bits));
      }
    }
  }
}

// The 16 rows of a warp: all that a product of the warpgroup has in common is in shared memory.
void multiply(const Slot* slots, size_t which, uint32_t warp) {
  const auto of_lane = [&](uint32_t l) -> const Product& {
    return reinterpret_cast<const Own*>(slots[l].wide[0])->products[which].product;
  };
  const Product& first = of_lane(0);
  const uint32_t n = first.n, depth = first.type == ProductType::tf32 ? 8 : 16;
  for (uint32_t l = 1; l < 32; ++l) {
    const Product& p = of_lane(l);
    if (p.b != first.b || p.n != n || p.add != first.add || p.a_in_registers != first.a_in_registers ||
        (!p.a_in_registers && p.a != first.a)) {
      fail("lanes of one warp issue different products");
    }
  }
  static float a[16][16], b[16][256], d[16][256];
  if (!first.a_in_registers) {
    read_operand(first, first.a, first.a_transposed, warp % 4 * 16, 16, depth,
                 [&](uint32_t i, uint32_t k, float x) { a[i][k] = x; });
  } else {
    for (uint32_t i = 0; i < 16; ++i) {
      for (uint32_t k = 0; k < depth; ++k) {
        a[i][k] = depth == 8 ? number(first.type, of_lane(i % 8 * 4 + k % 4).registers[i / 8 + k / 4 * 2])
                             : number(first.type, of_lane(i % 8 * 4 + k % 8 / 2).registers[i / 8 + k / 8 * 2] >> (k % 2 * 16));
      }
    }
  }
  read_operand(first, first.b, first.b_transposed, 0, n, depth, [&](uint32_t j, uint32_t k, float x) { b[k][j] = x; });
  for (uint32_t l = 0; l < 32; ++l) {
    const Product& p = of_lane(l);
    for (uint32_t j = 0; j < n / 2; ++j) d[l / 4 + (j & 2) * 4][j / 4 * 8 + l % 4 * 2 + (j & 1)] = p.add ? p.d[j] : 0;
  }
  for (uint32_t i = 0; i < 16; ++i) {
    for (uint32_t k = 0; k < depth; ++k) {
      for (uint32_t j = 0; j < n; ++j) d[i][j] += a[i][k] * b[k][j];
    }
  }
  for (uint32_t l = 0; l < 32; ++l) {
    const Product& p = of_lane(l);
    for (uint32_t j = 0; j < n / 2; ++j) p.d[j] = d[l / 4 + (j & 2) * 4][j / 4 * 8 + l % 4 * 2 + (j & 1)];
  }
}

// wide[0]: the lane's Own, wide[1]: the first group that stays, wide[2]: the warp.
void run_products(Slot* slots, uint32_t) {
  auto* own = reinterpret_cast<Own*>(slots[0].wide[0]);
  const int stays = static_cast<int>(slots[0].wide[1]);
  size_t count = 0;
  while (count < own->products.size() && own->products[count].group < stays) ++count;
  for (uint32_t l = 1; l < 32; ++l) {
    const auto* other = reinterpret_cast<const Own*>(slots[l].wide[0]);
    if (other->products.size() != own->products.size() || other->group != own->group || slots[l].wide[1] != slots[0].wide[1]) {
      fail("lanes of one warp have issued different products");
    }
  }
  for (size_t i = 0; i < count; ++i) multiply(slots, i, static_cast<uint32_t>(slots[0].wide[2]));
  for (uint32_t l = 0; l < 32; ++l) {
    auto& products = reinterpret_cast<Own*>(slots[l].wide[0])->products;
    products.erase(products.begin(), products.begin() + static_cast<int64_t>(count));
  }
}
void finish_products(const char* kind, int pending) {
  Slot slot = {};
  Own& own = mine();
  slot.wide[0] = reinterpret_cast<uint64_t>(&own);
  slot.wide[1] = static_cast<uint64_t>(std::max(own.group - pending, 0));
  slot.wide[2] = self().thread.x / 32;
  meet(kind, 0xffffffffu, slot, run_products);
}

}  // namespace

// ---- what the kernels call --------------------------------------------------------------------------------------------------

void phases_init(void* barrier, uint32_t count) {
  shared_address(barrier);
  Phases p = {};
  p.count = p.pending = count;
  p.mark = kMark;
  std::memcpy(barrier, &p, sizeof p);
}
void phases_arrive(void* barrier, uint32_t bytes) {
  Phases p = read_barrier(barrier);
  if (p.pending == 0) fail("it arrives at a barrier that has all arrivals of its phase");
  p.bytes += bytes;
  --p.pending;
  write_barrier(barrier, p);
}
void phases_wait(void* barrier, uint32_t parity) {
  const bool is_complete = read_barrier(barrier).parity != (parity & 1);
  land_all(barrier, is_complete);
  while (read_barrier(barrier).parity == (parity & 1)) {
    waiting.push_back({barrier, &self()});
    sleep();
  }
}

void load_box_later(void* to, const void* map, void* barrier, const int (&at)[5]) {
  TensorBox box;
  std::memcpy(&box, map, sizeof box);
  if (box.mark != TensorBox::kMark) fail("a box of a tensor map that was not encoded");
  const uint32_t bytes = box.element * box.box[0] * box.box[1] * box.box[2] * box.box[3] * box.box[4];
  const uint32_t address = shared_address(to);
  if (address % 128 != 0) fail("a box to an address that is no multiple of 128");
  shared_pointer(address, bytes);
  depart({barrier, address, bytes, nullptr, box, {at[0], at[1], at[2], at[3], at[4]}, false});
}
void load_bytes_later(void* to, const void* from, uint32_t bytes, void* barrier) {
  const uint32_t address = shared_address(to);
  if (address % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) {
    fail("a copy of bytes that are no multiples of 16");
  }
  shared_pointer(address, bytes);
  depart({barrier, address, bytes, from, {}, {}, false});
}
void store_bytes_later(void* to, const void* from, uint32_t bytes) {
  const uint32_t address = shared_address(from);
  if (address % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0 || bytes % 16 != 0) {
    fail("a copy of bytes that are no multiples of 16");
  }
  const Store store = {to, address, bytes};
  if (runs_backwards()) {
    run_store(store);
  } else {
    mine().stores.push_back(store);
  }
}
void finish_stores() {
  for (const Store& s : mine().stores) run_store(s);
  mine().stores.clear();
}

void issue_product(const Product& product) {
  Own& own = mine();
  own.products.push_back({product, own.group});
  ++own.issued;
}
void commit_products() {
  ++mine().group;
  if (runs_backwards()) finish_products("wgmma.commit_group", 0);
}
void wait_products(int pending) { finish_products("wgmma.wait_group", pending); }

void begin_hopper_block() {
  waiting.clear();
  flights.clear();
  owns.clear();
  owns.resize(1024);
}
void end_hopper_thread() {
  if (!mine().products.empty()) fail("it ended before a product that it did not wait for");
  if (!mine().stores.empty()) fail("it ended before a copy out of shared memory that it did not wait for");
}
void end_hopper_block() {
  if (!flights.empty()) fail("the block ended before a copy into its shared memory that nobody waited for");
  for (size_t i = 0; i + 128 <= owns.size(); i += 32) {
    if (owns[i].issued != owns[i / 128 * 128].issued) fail("warps of one warpgroup issued different numbers of products");
  }
}
std::string hopper_waits() {
  std::string text;
  std::vector<const void*> told;
  for (const Waiting& w : waiting) {
    if (std::find(told.begin(), told.end(), w.barrier) != told.end()) continue;
    told.push_back(w.barrier);
    const auto count = std::count_if(waiting.begin(), waiting.end(), [&](const Waiting& x) { return x.barrier == w.barrier; });
    Phases p;
    std::memcpy(&p, w.barrier, sizeof p);
    text += " " + std::to_string(count) + " threads at the barrier at byte " + std::to_string(shared_address(w.barrier)) +
            ", which lacks " + std::to_string(p.pending) + " arrivals of " + std::to_string(p.count) + " and " +
            std::to_string(static_cast<int64_t>(p.bytes)) + " bytes;";
  }
  return text;
}

}  // namespace linnet::emulate
