// peer: the functions a user would take instead (PyTorch's), measured by a child process so that they run as their users run
// them, in turn with ours.
//
//   std::unique_ptr<Peer> peer;
//   LINNET_TRY(Peer::start(find_python(""), 2, &peer));             // 2 threads
//   std::string name;
//   LINNET_TRY(peer->open(case_json, &name));                       // name is empty when nobody offers this case
//   LINNET_TRY(peer->round(0.2, &seconds));                         // call it for 0.2 s; appends the time of each call
//
// The child runs src/bench/peers.py with every src/mechanisms/*/*_peer.py behind it, which this library carries as text. One
// line of JSON goes each way over a socket: {"open": case, "warm": true}, {"round": seconds}; answers {"name": .., "notes":
// [..]},
// {"seconds": [..]}, {"error": ..}.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "core/status.h"

namespace linnet::bench {

// The Python whose torch is measured: `wanted`, else LINNET_PYTHON, else the one beside this program, else the checkout's
// .venv, else python3.
std::string find_python(const std::string& wanted);

// The folder of the Python package that a build has made beside this program; empty: there is none.
std::string built_package();

class Peer {
 public:
  static Status start(const std::string& python, int threads, std::unique_ptr<Peer>* peer);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  const std::string& version() const { return version_; }  // "torch 2.13.0"
  pid_t process() const { return child_; }
  // warm: the work is done once before it is measured. notes: sentences about what is missing, appended.
  Status open(const std::string& case_json, std::string* name, bool warm = true, std::vector<std::string>* notes = nullptr);
  Status round(double seconds, std::vector<double>* samples);

 private:
  Peer() = default;
  Status ask(const std::string& line, std::string* answer);

  std::string python_, version_, buffer_;
  int socket_ = -1;
  pid_t child_ = -1;
};

}  // namespace linnet::bench
