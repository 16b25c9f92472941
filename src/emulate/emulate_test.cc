// Every row of the GPU's tables that a GPU of compute capability 8.0 takes, on the emulated one (docs/emulate.md), against the
// reference in double: small random cases of each type, forward and backward. With LINNET_EMULATE_GPU=h200 those of Hopper
// alone. And kernels with faults, which it has to notice.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "check/check.h"
#include "check/sample.h"
#include "core/cuda/driver.h"

namespace linnet::check {
namespace {

constexpr int kCases = 4;  // of a row and type

// Before anything asks for the driver.
[[maybe_unused]] const int chosen = setenv("LINNET_CUDA_DRIVER", LINNET_EMULATED_DRIVER, 1);

std::vector<const Op*> ops_with_rows() {
  std::vector<const Op*> ops;
  for (const Op* op : all_ops()) {
    if (has_impl_on(*op, Device::cuda)) ops.push_back(op);
  }
  return ops;
}

bool is_set_to(const char* variable, const char* value) {
  const char* text = std::getenv(variable);
  return text != nullptr && std::string(text) == value;
}

class Emulated : public testing::TestWithParam<const Op*> {};

TEST_P(Emulated, rows_agree_with_the_reference) {
  ASSERT_EQ(cuda::missing(), "");
  const Op& op = *GetParam();
  const bool of_hopper = is_set_to("LINNET_EMULATE_GPU", "h200");
  for (const Impl& impl : op.impls) {
    if (impl.device != Device::cuda || !impl.missing().empty()) continue;
    if (impl.name == "cuda.blas") continue;     // NVIDIA's own
    if (impl.name == "cuda.cluster") continue;  // there are no clusters of blocks here
    if (of_hopper && impl.missing != hopper_available) continue;
    int ran = 0;
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
      Random random(7, op.name + impl.name + dtype_name(dtype));
      Sampling sampling;
      sampling.dtypes = {dtype};
      sampling.impls = {impl.name};
      sampling.cost = {4e5, 1e5};
      for (int i = 0; i < kCases; ++i) {
        Case c;
        if (!sample_case(op, random, sampling, &c).ok()) break;  // a row without this type
        Result result;
        const Status status = run_case(c, &result);
        if (is_refusal(status)) continue;
        ASSERT_TRUE(status.ok()) << to_text(c) << ": " << status.message();
        EXPECT_TRUE(result.ok()) << result.text();
        ++ran;
      }
    }
    // The delta rules' chunks have gradients alone: the cases below.
    const bool gradients_alone = impl.name == "cuda.chunk" && (op.name == "delta" || op.name == "gated_delta");
    // Small random cases reach every row of Hopper's through some operator, but not through each.
    EXPECT_TRUE(ran > 0 || gradients_alone || of_hopper) << op.name << " " << impl.name << ": no case that it takes was found";
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, Emulated, testing::ValuesIn(ops_with_rows()), [](const auto& each) { return each.param->name; });

class EmulatedCase : public testing::TestWithParam<const char*> {};
TEST_P(EmulatedCase, agrees_with_the_reference) {
  Result result;
  const Status status = run_line(GetParam(), &result);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(result.ok()) << result.text();
}
INSTANTIATE_TEST_SUITE_P(
    Cases, EmulatedCase,
    testing::Values("delta B=1 T=70 Hq=1 Hk=1 Hv=1 K=16 V=16 dtype=f32 pass=bwd impl=cuda seed=1",
                    "gated_delta B=1 T=70 Hq=1 Hk=1 Hv=1 K=16 V=16 dtype=f32 pass=bwd impl=cuda seed=1",
                    "softmax B=1 Tq=70 Tk=70 H=2 Hkv=1 K=64 V=64 causal=1 dtype=f16 pass=bwd impl=cuda.tile seed=1",
                    "softmax B=1 Tq=70 Tk=70 H=1 Hkv=1 K=128 V=128 causal=1 dtype=bf16 pass=bwd impl=cuda seed=1",
                    "softmax B=1 Tq=40 Tk=40 H=1 Hkv=1 K=256 V=256 causal=1 dtype=bf16 pass=bwd impl=cuda seed=1",
                    "monarch B=3 T=16 H=3 K=10 S=16 V=10 scale=20 causal=1 dtype=f32 pass=bwd impl=cuda.plain strided=1 "
                    "values=masked seed=289236",
                    "monarch B=3 T=13 H=3 K=8 S=13 V=8 block=99 scale=1000 causal=1 skip=dlse dtype=bf16 pass=bwd "
                    "impl=cuda.plain values=masked seed=474791",
                    "fem_read B=1 S=1 H=8 V=8 K=8 prior=gated with=a,q,k dtype=f16 pass=bwd impl=cuda threads=7 seed=829808",
                    "hierarchical B=2 T=37 H=2 K=8 V=6 E=3 nodes=47 arity=6 include_self=1 with=pos,mask tie=block dtype=f32 "
                    "pass=bwd impl=cuda seed=3",
                    "hierarchical B=2 T=37 H=2 K=8 V=6 E=3 nodes=47 arity=6 include_self=1 with=pos,mask tie=prefix causal=1 "
                    "dtype=f32 pass=bwd impl=cuda seed=3",
                    "hierarchical B=2 T=37 H=2 K=8 V=6 E=3 nodes=47 arity=6 include_self=1 with=pos,mask tie=row causal=1 "
                    "dtype=f32 pass=bwd impl=cuda seed=3",
                    "hierarchical B=2 T=37 H=2 K=8 V=6 E=3 nodes=47 arity=6 include_self=1 with=pos,mask tie=row dtype=f32 "
                    "pass=bwd impl=cuda seed=3",
                    "distill B=1 T=70 S=70 H=2 K=8 V=5 M=9 causal=1 with=key_mask,key_logw dtype=f32 pass=bwd impl=cuda seed=1",
                    "distill B=2 T=37 S=37 H=1 K=8 V=140 M=130 with=key_mask dtype=bf16 pass=bwd impl=cuda seed=1",
                    "distill_window B=1 T=150 H=1 K=4 V=3 F=4 window=40 dtype=f32 pass=bwd impl=cuda seed=1",
                    "distill_window B=1 T=520 H=1 K=4 V=1 F=1 window=3 dtype=f32 pass=fwd impl=cuda seed=1",
                    "recurrence_segments B=2 T=40 Hq=2 Hk=1 Hv=2 K=70 V=5 with=g,beta,A,segment_A segment=9 dtype=f32 pass=fwd "
                    "impl=cuda seed=1"));

// Threads of a kernel of tests/emulate/faults.cu on 64 floats, which it changes.
std::vector<float> run_fault(const char* name, int threads = 64, int shared_bytes = 1024) {
  std::vector<float> x(64, 1);
  void* memory = nullptr;
  EXPECT_TRUE(cuda::allocate(260, &memory).ok());
  EXPECT_TRUE(cuda::copy_to_device(memory, x.data(), 256).ok());
  const char* error = nullptr;
  const Launch launch = {.error = &error};
  cuda::enqueue(launch, {"faults", name, threads, shared_bytes}, {1}, memory);
  EXPECT_EQ(error, nullptr) << error;
  EXPECT_TRUE(cuda::copy_to_host(x.data(), memory, 256).ok());
  cuda::release(memory);
  return x;
}

TEST(FaultyKernels, show_in_results) {
  const std::vector<float> whole = run_fault("no_fault"), racing = run_fault("no_barrier"), early = run_fault("not_waited_for");
  int unknown = 0;
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(whole[static_cast<size_t>(i)], static_cast<float>(63 - i));
    unknown += std::isnan(racing[static_cast<size_t>(i)]) ? 1 : 0;
  }
  EXPECT_TRUE(std::isnan(early[0]));  // in the thread that copies: it is done when that ends
  EXPECT_EQ(unknown, 32);             // half of the threads come before the one that they read from
}

// What runs by itself is done as late as it may be, or, backwards, as early.
TEST(FaultyKernels, show_what_was_not_waited_for) {
  const auto first = [](const char* name) { return run_fault(name, 128, 16 * 1024)[0]; };
  const bool backwards = is_set_to("LINNET_EMULATE_ORDER", "backwards");
  EXPECT_EQ(first("copied"), 1);
  EXPECT_EQ(first("copied_too_late"), backwards ? 1 : 7);
  EXPECT_EQ(first("product"), 16);
  EXPECT_EQ(first("product_not_waited_for"), backwards ? 16 : 0);
  EXPECT_EQ(first("operand_overwritten"), backwards ? 16 : 0);
}

struct Fault {
  const char *kernel, *sentence;
  int threads = 64, shared_bytes = 1024;
};
class Faults : public testing::TestWithParam<Fault> {};
TEST_P(Faults, stop_with_a_sentence) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Fault& fault = GetParam();
  EXPECT_EXIT(run_fault(fault.kernel, fault.threads, fault.shared_bytes), testing::ExitedWithCode(1), fault.sentence);
}
INSTANTIATE_TEST_SUITE_P(Kernels, Faults,
                         testing::Values(Fault{"behind_the_end", "outside of memory"},
                                         Fault{"beside_the_end", "beside the memory"}, Fault{"misaligned", "misaligned"},
                                         Fault{"too_much_shared", "behind the shared memory"},
                                         Fault{"ended_lanes", "have ended|ended while"},
                                         Fault{"different_places", "different instructions"},
                                         Fault{"half_a_barrier", "wait for each other"},
                                         Fault{"product_left_behind", "before a product", 128, 16384},
                                         Fault{"products_of_two_warps", "different numbers of products", 128, 16384},
                                         Fault{"copy_left_behind", "that nobody waited for", 128},
                                         Fault{"barrier_without_beginning", "not initialised", 128},
                                         Fault{"one_arrival_too_few", "lacks 1 arrivals of 128", 128}),
                         [](const auto& each) { return std::string(each.param.kernel); });

}  // namespace
}  // namespace linnet::check
