#include "cli/python_job.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "bench/peer.h"

namespace linnet::cli {
namespace {

// argv: -c, the folder of a build's package or "", the module, its words.
constexpr char kStart[] = R"(
import importlib.util, runpy, sys
_, place, name, *words = sys.argv
if place:
    sys.path.insert(0, place)
def stop(sentence):
    print(f'linnet: {name}: {sentence}', file=sys.stderr)
    sys.exit(3)
if importlib.util.find_spec('torch') is None:
    stop(f'this needs PyTorch, and {sys.executable} has none; install it with: {sys.executable} -m pip install torch')
if importlib.util.find_spec('linnet') is None:
    stop(f'{sys.executable} has torch but no linnet; `pip install .` builds the package, and so does a build with -DLINNET_TORCH=ON')
try:
    import linnet
except ImportError as problem:
    stop(problem)
if importlib.util.find_spec('linnet.' + name) is None:
    stop(f'{linnet.__file__} is a package without linnet.{name}: another version?')
sys.argv = ['linnet ' + name, *words]
runpy.run_module('linnet.' + name, run_name='__main__', alter_sys=True)
)";

}  // namespace

int run_python_job(const std::string& name, const std::string& wanted, const std::vector<std::string>& words) {
  const std::string python = bench::find_python(wanted);
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  std::vector<std::string> line = {python, "-c", kStart, bench::built_package(), name};
  line.insert(line.end(), words.begin(), words.end());
  std::vector<char*> argv;
  argv.reserve(line.size() + 1);
  for (std::string& word : line) argv.push_back(word.data());
  argv.push_back(nullptr);
  setenv("LINNET_COMMAND", self.c_str(), 1);  // for the page that it asks of us
  setenv("OMP_WAIT_POLICY", "passive", 0);    // spinning threads of torch would keep ours from the cores
  std::fflush(stdout);
  execvp(python.c_str(), argv.data());
  return fail(impossible(name + ": '" + python + "' cannot be started: " + std::strerror(errno) +
                         "; a Python with torch is chosen by --python or LINNET_PYTHON"));
}

}  // namespace linnet::cli
