// Vector files of layers (src/layers).
#pragma once

#include "check/files/file_kind.h"

namespace linnet::check {

const FileKind& layer_files();
// For a file of an operator's call that holds a layer around it too; null when it does not.
const FileKind* layer_in_file(const SafetensorsFile& file);

}  // namespace linnet::check
