// python_job: subcommands whose work needs gradients are Python modules of the package (`python -m linnet.train`). The command
// finds a Python that has torch and the package, and becomes it.
#pragma once

#include <string>
#include <vector>

#include "cli/command.h"

namespace linnet::cli {

// Replaces this process by `python -m linnet.NAME WORDS`; returns only where that cannot be, with the exit code. `python`: the
// one to take (--python), otherwise LINNET_PYTHON, the one beside this program, the checkout's .venv, python3.
int run_python_job(const std::string& name, const std::string& python, const std::vector<std::string>& words);

}  // namespace linnet::cli
