// Declarations as JSON: what Python, other languages and `linnet info --json` know about an operator.
//
//   {"name": "softmax", "mechanism": "softmax", "summary": ..., "equation": ..., "decode": "softmax_decode",
//    "differentiable": true,
//    "inputs":  [{"name": "q", "shape": ["B", "Tq", "H", "K"], "element": "io", "values": "normal", "optional": false, ...}],
//    "outputs": [{"name": "lse", "shape": ["B", "Tq", "H"], "element": "acc", "optional": true, "saved": true, ...}],
//    "options": [{"name": "scale", "kind": "maybe_real", "default": null, "low": null, "high": null, "doc": ...}],
//    "letters": [{"letter": "F", "by": "map", "cases": [["elu1", "K"], ...]}],  "multiples": [["H", "Hkv"]],
//    "example": {"B": 2, "Tq": 16, ...},
//    "implementations": [{"name": "ref", "backward": true, "usable": true, "reason": ""}]}
//
// A bound that limits nothing and a letter rule that depends on no option are null.
#pragma once

#include <string>

#include "core/files/json.h"
#include "core/op.h"

namespace linnet {

const char* option_kind_name(OptionKind kind);
void describe(const Op& op, JsonWriter& json);  // one object
std::string describe_json(const Op& op, int indent = 0);
// {"version": ..., "ops": [...]} with every operator.
std::string describe_json(int indent = 0);

}  // namespace linnet
