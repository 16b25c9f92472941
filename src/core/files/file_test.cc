#include "core/files/file.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace linnet {
namespace {

TEST(File, ReadsAllOrSaysWhy) {
  const std::string path = testing::TempDir() + "linnet-file-test-" + std::to_string(::getpid());
  ASSERT_TRUE(write_file(path, "0123456789").ok());
  std::string content;
  EXPECT_EQ(read_file(path, 9, content).message(), path + ": 10 bytes, more than the limit of 9");
  ASSERT_TRUE(read_file(path, 10, content).ok());
  EXPECT_EQ(content, "0123456789");
  InputFile in;
  ASSERT_TRUE(InputFile::open(path, in).ok());
  char buffer[10];
  EXPECT_TRUE(in.read(10, 0, buffer).ok());
  EXPECT_EQ(in.read(8, 3, buffer).message(), path + ": has no 3 bytes at byte 8, only 10 in all");
  EXPECT_EQ(in.read(~uint64_t{0}, 2, buffer).message(), path + ": has no 2 bytes at byte 18446744073709551615, only 10 in all");
  ASSERT_EQ(::truncate(path.c_str(), 4), 0);
  EXPECT_EQ(in.read(0, 10, buffer).message(), path + ": ends at byte 4 now, but had 10 bytes when it was opened");
  ASSERT_EQ(::unlink(path.c_str()), 0);
}

// A file under its final name is complete: what is not committed leaves neither the file nor a temporary one.
TEST(File, AppearsWhenCommitted) {
  const std::string path = testing::TempDir() + "linnet-file-test-" + std::to_string(::getpid());
  ASSERT_TRUE(write_file(path, "old").ok());
  std::string content;
  {
    OutputFile out;
    ASSERT_TRUE(OutputFile::create(path, out).ok());
    ASSERT_TRUE(out.write("new", 3).ok());
    ASSERT_TRUE(read_file(path, 100, content).ok());
    EXPECT_EQ(content, "old");
  }
  ASSERT_TRUE(read_file(path, 100, content).ok());
  EXPECT_EQ(content, "old");
  OutputFile out;
  ASSERT_TRUE(OutputFile::create(path, out).ok());
  ASSERT_TRUE(out.write("new", 3).ok());
  ASSERT_TRUE(out.commit().ok());
  ASSERT_TRUE(read_file(path, 100, content).ok());
  EXPECT_EQ(content, "new");
  ASSERT_EQ(::unlink(path.c_str()), 0);
}

}  // namespace
}  // namespace linnet
