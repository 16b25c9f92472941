#include "bench/peer.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "core/files/json.h"

extern "C" const char linnet_peers_begin[], linnet_peers_end[];  // the Python text, embedded by cmake/embed.cmake

namespace linnet::bench {

std::string find_python(const std::string& wanted) {
  if (!wanted.empty()) return wanted;
  if (const char* python = std::getenv("LINNET_PYTHON"); python != nullptr && *python != '\0') return python;
  std::error_code error;
  const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  if (!error) {
    for (const std::filesystem::path& python : {here / "python", here.parent_path() / ".venv" / "bin" / "python"}) {
      std::error_code ignored;  // a folder of that name is executable, too
      if (std::filesystem::is_regular_file(python, ignored) && access(python.c_str(), X_OK) == 0) return python;
    }
  }
  return "python3";
}

std::string built_package() {
  std::error_code error;
  const std::filesystem::path place = std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "python";
  return !error && std::filesystem::exists(place / "linnet" / "liblinnet_torch.so", error) ? place.string() : "";
}

Status Peer::start(const std::string& python, int threads, std::unique_ptr<Peer>* peer) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return impossible(std::string("bench: no socket for the peers: ") + std::strerror(errno));
  }
  const std::string script =
      std::string(linnet_peers_begin, linnet_peers_end) + "\nserve(int(sys.argv[1]), int(sys.argv[2]))\n";
  const std::string count = std::to_string(threads);
  const std::string channel = std::to_string(ends[1]);
  const std::string package = built_package();
  const pid_t child = fork();
  if (child == 0) {
    setenv("OMP_NUM_THREADS", count.c_str(), 1);
    if (!package.empty()) setenv("LINNET_PACKAGE", package.c_str(), 1);
    fcntl(ends[1], F_SETFD, 0);  // the child inherits its end, by number
    execlp(python.c_str(), python.c_str(), "-c", script.c_str(), channel.c_str(), count.c_str(), static_cast<char*>(nullptr));
    dprintf(ends[1], "{\"error\": \"it cannot be started: %s\"}\n", std::strerror(errno));
    _exit(127);
  }
  close(ends[1]);
  peer->reset(new Peer);
  (*peer)->python_ = python;
  (*peer)->socket_ = ends[0];
  (*peer)->child_ = child;
  if (child < 0) return impossible(std::string("bench: cannot start ") + python + ": " + std::strerror(errno));

  std::string answer;
  JsonValue greeting;
  Status status = (*peer)->ask("", &answer);
  if (status.ok()) status = parse_json(answer, "peers", {}, greeting);
  if (status.ok() && greeting.has("error")) status = impossible(greeting.find("error").string());
  if (!status.ok()) {
    return impossible("bench: --peers needs PyTorch, and '" + python + "' has none (" + status.message() +
                      "); install it with '" + python + " -m pip install torch==2.13.0' or choose another Python by --python");
  }
  (*peer)->version_ = greeting.find("version").string();
  return {};
}

Peer::~Peer() {
  if (socket_ >= 0) close(socket_);  // the child's read ends, and so does the child
  if (child_ > 0) {
    for (int i = 0; i < 200 && waitpid(child_, nullptr, WNOHANG) == 0; ++i) usleep(10000);
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
}

// Sends a line (none when empty) and waits for the answer's line.
Status Peer::ask(const std::string& line, std::string* answer) {
  if (!line.empty()) {
    const std::string message = line + "\n";
    for (size_t sent = 0; sent < message.size();) {
      const ssize_t n = send(socket_, message.data() + sent, message.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return impossible("it ended unexpectedly");
      sent += static_cast<size_t>(n);
    }
  }
  for (;;) {
    if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
      *answer = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return {};
    }
    char piece[4096];
    const ssize_t n = recv(socket_, piece, sizeof piece, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return impossible("it ended unexpectedly");
    buffer_.append(piece, static_cast<size_t>(n));
  }
}

Status Peer::open(const std::string& case_json, std::string* name, bool warm, std::vector<std::string>* notes) {
  std::string answer;
  JsonValue root;
  LINNET_TRY(ask("{\"open\": " + case_json + ", \"warm\": " + (warm ? "true" : "false") + "}", &answer));
  LINNET_TRY(parse_json(answer, "peers", {}, root));
  if (root.has("error")) return impossible("peer: " + root.find("error").string());
  *name = root.find("name").string();
  const JsonValue list = root.find("notes");
  for (JsonItems items(list); notes != nullptr && items.next();) notes->push_back(items.value().string());
  return {};
}

Status Peer::round(double seconds, std::vector<double>* samples) {
  std::string answer;
  JsonValue root;
  LINNET_TRY(ask("{\"round\": " + std::to_string(seconds) + "}", &answer));
  LINNET_TRY(parse_json(answer, "peers", {}, root));
  if (root.has("error")) return impossible("peer: " + root.find("error").string());
  const JsonValue list = root.find("seconds");
  for (JsonItems items(list); items.next();) {
    double x;
    if (items.value().number(x)) samples->push_back(x);
  }
  return {};
}

}  // namespace linnet::bench
