#include "core/files/safetensors_model.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>

namespace linnet {
namespace {

namespace fs = std::filesystem;

const char kIndex[] = "model.safetensors.index.json";

class ModelFolder : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "linnet-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    base_ = pattern;
    directory_ = base_ + "/model";
    fs::create_directory(directory_);
  }
  void TearDown() override { fs::remove_all(base_); }

  void shard(const std::string& path, const std::vector<std::string>& names) {
    static const float data[] = {1, 2};
    std::vector<SafetensorsTensor> tensors;
    for (const std::string& name : names) tensors.push_back({name, "F32", {2}, data});
    const Status status = write_safetensors(path, tensors);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  void index(const std::string& text) {
    const Status status = write_file(directory_ + "/" + kIndex, text);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  std::string base_, directory_;
};

TEST_F(ModelFolder, Shards) {
  shard(directory_ + "/a.safetensors", {"z", "b"});
  shard(directory_ + "/c.safetensors", {"y"});
  index(R"({"metadata":{"total_size":24},"weight_map":{"b":"a.safetensors","y":"c.safetensors","\u007a":"a.safetensors"}})");
  SafetensorsModel model;
  const Status status = SafetensorsModel::open(directory_, model);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(model.names(), (std::vector<std::string>{"b", "y", "z"}));
  EXPECT_TRUE(model.warnings().empty()) << model.warnings()[0];
  EXPECT_EQ(model.files().size(), 2u);
  EXPECT_EQ(model.file_of("missing"), nullptr);
  ASSERT_NE(model.file_of("y"), nullptr);
  EXPECT_EQ(model.file_of("y")->path(), directory_ + "/c.safetensors");
  std::vector<double> values;
  ASSERT_TRUE(model.file_of("z")->read_f64("z", values).ok());
  EXPECT_EQ(values, (std::vector<double>{1, 2}));
}

TEST_F(ModelFolder, OneFile) {
  SafetensorsModel model;
  EXPECT_EQ(SafetensorsModel::open(directory_, model).message(),
            directory_ + ": holds neither model.safetensors nor model.safetensors.index.json");
  shard(directory_ + "/model.safetensors", {"w"});
  ASSERT_TRUE(SafetensorsModel::open(directory_, model).ok());
  EXPECT_EQ(model.names(), std::vector<std::string>{"w"});
}

TEST_F(ModelFolder, OddButHarmless) {
  shard(directory_ + "/a.safetensors", {"w", "x", "y"});
  index(R"({"metadata":{"total_size":1e3},"weight_map":{"w":"a.safetensors"}})");
  SafetensorsModel model;
  ASSERT_TRUE(SafetensorsModel::open(directory_, model).ok());
  const std::vector<std::string> expected = {
      directory_ + "/a.safetensors: tensors that the index does not list: 2",
      directory_ + "/" + kIndex + ": total_size is 1e3, but the tensors take 24 bytes",
  };
  EXPECT_EQ(model.warnings(), expected);
}

TEST_F(ModelFolder, AttacksAreRefusedWithTheirReason) {
  shard(directory_ + "/a.safetensors", {"w"});
  shard(directory_ + "/twice.safetensors", {"w"});
  shard(base_ + "/outside.safetensors", {"w"});
  fs::create_directory(directory_ + "/sub");
  shard(directory_ + "/sub/b.safetensors", {"w"});
  shard(directory_ + "/a.bin", {"w"});
  fs::create_symlink("../outside.safetensors", directory_ + "/link.safetensors");
  fs::create_symlink("a.safetensors", directory_ + "/inner.safetensors");
  fs::create_symlink("..", directory_ + "/up.safetensors");
  ASSERT_TRUE(write_file(directory_ + "/bad.safetensors", "bad").ok());

  const std::string i = directory_ + "/" + kIndex + ": ", plain = " is not a plain name of a file in the same directory";
  const auto one = [](const std::string& name) { return "{\"weight_map\":{\"w\":\"" + name + "\"}}"; };
  struct Attack {
    const char* name;
    std::string index, message;
  };
  const Attack attacks[] = {
      {"too long", std::string(kMaxIndexBytes + 1, ' '), i + "16777217 bytes, more than the limit of 16777216"},
      {"not JSON", "{", i + "expected a key in quotes at byte 1"},
      {"too deep", std::string(33, '['), i + "nested deeper than 32 at byte 32"},
      {"duplicate", R"({"weight_map":{"w":"a.safetensors","w":"a.safetensors"}})",
       i + "in \"weight_map\": duplicate key \"w\" at byte 35"},
      {"an array", "[]", i + "has no weight_map that is an object"},
      {"no map", "{}", i + "has no weight_map that is an object"},
      {"map of the wrong kind", R"({"weight_map":"a.safetensors"})", i + "has no weight_map that is an object"},
      {"file is a number", R"({"weight_map":{"w":1}})", i + "tensor \"w\" is mapped to 1, expected a file name"},
      {"parent", one("../outside.safetensors"), i + "file name \"../outside.safetensors\"" + plain},
      {"absolute", one(base_ + "/outside.safetensors"), i + "file name \"" + base_ + "/outside.safetensors\"" + plain},
      {"folder", one("sub/b.safetensors"), i + "file name \"sub/b.safetensors\"" + plain},
      {"backslash", one("sub\\\\b.safetensors"), i + "file name \"sub\\\\b.safetensors\"" + plain},
      {"two points", one("a..safetensors"), i + "file name \"a..safetensors\"" + plain},
      {"nul byte", one("a.safetensors\\u0000.safetensors"), i + "file name \"a.safetensors\\u0000.safetensors\"" + plain},
      {"pickle", one("a.bin"), i + "file name \"a.bin\" does not end in .safetensors"},
      {"empty", one(""), i + "file name \"\" does not end in .safetensors"},
      {"missing", one("none.safetensors"), i + "file name \"none.safetensors\": there is no such file"},
      {"link outside", one("link.safetensors"),
       i + "file name \"link.safetensors\" is a link that leaves the directory; put the file itself there"},
      {"link to the parent", one("up.safetensors"),
       i + "file name \"up.safetensors\" is a link that leaves the directory; put the file itself there"},
      {"bad file", one("bad.safetensors"),
       directory_ + "/bad.safetensors: has 3 bytes; a safetensors file begins with 8 bytes that give the header's length"},
      {"tensor not in its file", R"({"weight_map":{"w":"a.safetensors","x":"a.safetensors"}})",
       i + "tensor \"x\" is mapped to " + directory_ + "/a.safetensors, which does not hold it"},
      {"tensor in two files", R"({"weight_map":{"w":"a.safetensors","x":"twice.safetensors"}})",
       directory_ + "/twice.safetensors: tensor \"w\": is also in " + directory_ + "/a.safetensors"},
      {"file under two names", R"({"weight_map":{"w":"a.safetensors","x":"inner.safetensors"}})",
       directory_ + "/inner.safetensors: tensor \"w\": is also in " + directory_ + "/a.safetensors"},
  };
  for (const Attack& a : attacks) {
    index(a.index);
    SafetensorsModel model;
    const Status status = SafetensorsModel::open(directory_, model);
    EXPECT_EQ(status.message(), a.message) << a.name;
    EXPECT_EQ(status.code(), Code::bad_input) << a.name;
    EXPECT_EQ(model.size(), 0u) << a.name;
  }
  index(one("inner.safetensors"));  // a link that stays inside is fine
  SafetensorsModel model;
  const Status status = SafetensorsModel::open(directory_, model);
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST_F(ModelFolder, TensorMappedToTheWrongFile) {
  shard(directory_ + "/a.safetensors", {"w"});
  shard(directory_ + "/b.safetensors", {"x"});
  index(R"({"weight_map":{"w":"b.safetensors","x":"a.safetensors"}})");
  SafetensorsModel model;
  EXPECT_EQ(SafetensorsModel::open(directory_, model).message(),
            directory_ + "/" + kIndex + ": tensor \"w\" is mapped to " + directory_ + "/b.safetensors, which does not hold it");
}

}  // namespace
}  // namespace linnet
