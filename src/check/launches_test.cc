// What calls launch on a GPU, compared with the compiled images: the host finds kernels by name and passes parameters by
// address, and nothing else would notice a name or a type that differs before a GPU does. Needs images (nvcc), and no GPU.
#include <elf.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <regex>
#include <set>

#include "check/plan.h"
#include "check/random.h"
#include "check/sample.h"
#include "core/files/file.h"

namespace linnet::check {
namespace {

struct KernelInfo {
  std::vector<size_t> parameters;  // bytes of each
  int most_threads = 1024;
};
using Image = std::map<std::string, KernelInfo>;

// The kernels of a cubin: an ELF file with a section .nv.info.NAME for each, a list of (format, attribute, value).
Image read_image(const std::string& name) {
  Image image;
  InputFile file;
  const Status status = InputFile::open(std::string(LINNET_IMAGES_DIR) + "/" + name + ".cubin", file);
  EXPECT_TRUE(status.ok()) << status.message();
  if (!status.ok()) return image;
  std::vector<uint64_t> memory(file.size() / 8 + 1);
  EXPECT_TRUE(file.read(0, file.size(), memory.data()).ok());
  const char* data = reinterpret_cast<const char*>(memory.data());
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(data);
  EXPECT_EQ(std::memcmp(header->e_ident, ELFMAG, SELFMAG), 0) << name;
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(data + header->e_shoff);
  const char* names = data + sections[header->e_shstrndx].sh_offset;
  constexpr std::string_view kPrefix = ".nv.info.";
  constexpr int kParameter = 0x17, kMostThreads = 0x05, kSized = 0x04;
  for (int i = 0; i < header->e_shnum; ++i) {
    const std::string_view section = names + sections[i].sh_name;
    if (!section.starts_with(kPrefix)) continue;
    KernelInfo& kernel = image[std::string(section.substr(kPrefix.size()))];
    const char* at = data + sections[i].sh_offset;
    for (const char* end = at + sections[i].sh_size; at + 4 <= end;) {
      const int format = static_cast<unsigned char>(at[0]), attribute = static_cast<unsigned char>(at[1]);
      uint16_t bytes = 0;
      std::memcpy(&bytes, at + 2, 2);
      at += 4;
      if (format != kSized) continue;  // the value was in place
      if (attribute == kParameter) {   // index, ordinal (16 bits), offset (16 bits), flags with the size from bit 18 on
        uint32_t words[3];
        std::memcpy(words, at, sizeof words);
        const size_t ordinal = words[1] & 0xffff;
        if (kernel.parameters.size() <= ordinal) kernel.parameters.resize(ordinal + 1);
        kernel.parameters[ordinal] = words[2] >> 18;
      } else if (attribute == kMostThreads) {
        int32_t threads[3];
        std::memcpy(threads, at, sizeof threads);
        kernel.most_threads = threads[0] * threads[1] * threads[2];
      }
      at += bytes;
    }
  }
  return image;
}

class Images {
 public:
  const KernelInfo* find(const cuda::Recorded& launch) {
    const auto [at, is_new] = images_.try_emplace(launch.image);
    if (is_new) at->second = read_image(launch.image);
    const auto kernel = at->second.find(launch.name);
    return kernel == at->second.end() ? nullptr : &kernel->second;
  }

 private:
  std::map<std::string, Image> images_;
};

void expect_kernels(const std::string& what, const std::vector<cuda::Recorded>& launches, Images& images,
                    std::set<std::string>* seen) {
  constexpr int kMostSharedBytes = 227 * 1024;  // of a block on an H200
  for (const cuda::Recorded& launch : launches) {
    const std::string name = launch.image + ": " + launch.name;
    if (seen->insert(name).second) {
      const KernelInfo* kernel = images.find(launch);
      ASSERT_NE(kernel, nullptr) << what << " launches " << name << ", which is not in its image";
      EXPECT_EQ(launch.parameters, kernel->parameters) << name << ": bytes of the parameters, by the host and by the kernel";
    }
    const KernelInfo* kernel = images.find(launch);
    if (kernel == nullptr) continue;
    EXPECT_LE(launch.threads, kernel->most_threads) << name;
    EXPECT_LE(launch.shared_bytes, kMostSharedBytes) << name;
    EXPECT_LE(launch.grid.x, int64_t{1} << 31) << name;
    EXPECT_LE(launch.grid.y, 65535) << name;
    EXPECT_LE(launch.grid.z, 65535) << name;
  }
}

TEST(Launches, name_kernels_of_their_images_with_the_parameters_that_those_declare) {
  Images images;
  std::set<std::string> seen;
  Random random(1, "launches");
  for (const Op* op : all_ops()) {
    if (!has_impl_on(*op, Device::cuda)) continue;
    // The shapes that are measured, and random ones, on each row that takes them.
    std::vector<Case> cases;
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
      for (int i = 0; i < 60; ++i) {
        Case c;
        Sampling sampling;
        sampling.impls = {"cuda"};
        sampling.dtypes = {dtype};
        const Status status = sample_case(*op, random, sampling, &c);
        ASSERT_TRUE(status.ok()) << status.message();
        cases.push_back(c);
        for (auto& [letter, size] : c.letters) {  // widths of the matrix units, and a long sequence
          if (letter == "K" || letter == "V") size = random.pick({64, 128});
          if (letter == "T" || letter == "S") size = i % 8 == 0 ? 20000 : size;
        }
        Cost cost;
        if (accepts(c, &cost).ok()) cases.push_back(c);
      }
    }
    for (const Case& each : cases) {
      for (const Impl& impl : op->impls) {
        Case c = each;
        c.impl = impl.device == Device::cpu ? "cuda" : impl.name;
        std::vector<cuda::Recorded> list;
        if (const Status status = launches(c, &list); !status.ok()) {
          EXPECT_EQ(status.code(), Code::impossible) << to_text(c) << ": " << status.message();
          EXPECT_NE(c.impl, "cuda") << to_text(c) << ": " << status.message();
          continue;
        }
        expect_kernels(to_text(c), list, images, &seen);
        if (impl.device == Device::cpu) break;  // the best row once
      }
    }
  }
  EXPECT_GE(seen.size(), 150u);
}

// The parts of an image: a header of 16 bytes, then each part with its kind (1 PTX, 2 machine code), the bytes of its own
// header and behind it, and the compute capability.
std::set<std::string> parts_of_image(const std::string& path) {
  std::set<std::string> parts;
  InputFile file;
  EXPECT_TRUE(InputFile::open(path, file).ok()) << path;
  std::vector<char> data(file.size());
  EXPECT_TRUE(file.read(0, file.size(), data.data()).ok());
  struct Part {
    uint16_t kind, version;
    uint32_t header;
    uint64_t bytes;
    uint32_t unknown[3], capability;
  } part;
  static_assert(sizeof part == 32);
  for (size_t at = 16; at + sizeof part <= data.size(); at += part.header + part.bytes) {
    std::memcpy(&part, data.data() + at, sizeof part);
    if (part.header == 0) break;
    parts.insert((part.kind == 1 ? "ptx " : "") + std::to_string(part.capability));
  }
  return parts;
}

TEST(Images, are_for_every_gpu_since_ampere_or_for_hopper_alone) {
  const std::regex hopper(LINNET_CUDA_HOPPER), rare(LINNET_CUDA_RARE);
  int portable = 0, tuned = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(LINNET_IMAGES_DIR)) {
    if (entry.path().extension() != ".fatbin") continue;
    const std::string name = "/" + std::filesystem::relative(entry.path(), LINNET_IMAGES_DIR).replace_extension(".cu").string();
    const bool is_tuned = std::regex_search(name, hopper);
    std::set<std::string> want{"ptx 80", "80", "90", "100", "120"};
    if (is_tuned) want = {"90"};
    if (std::regex_search(name, rare)) want = {"ptx 80", "90"};
    EXPECT_EQ(parts_of_image(entry.path().string()), want) << name;
    ++(is_tuned ? tuned : portable);
  }
  EXPECT_GE(portable, 45);
  EXPECT_GE(tuned, 20);
}

}  // namespace
}  // namespace linnet::check
