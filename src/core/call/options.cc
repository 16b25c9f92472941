// Options of a call: their ranges, and their values from and to text.
#include <charconv>
#include <cmath>
#include <limits>

#include "core/call/checks.h"
#include "core/call/members.h"

namespace linnet {

std::string number_text(double x) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, x).ptr;
  return std::string(text, end);
}

namespace {

std::string range_text(double low, double high) {
  if (std::isinf(low) || low == -std::numeric_limits<double>::max())
    return high >= 9e15 ? "a finite number" : "at most " + number_text(high);
  return high >= 9e15 ? "at least " + number_text(low) : number_text(low) + " to " + number_text(high);
}

}  // namespace

Status check_option(const Op& op, const OptionDecl& option, const void* args) {
  const auto range = [&](double x) -> Status {
    if (x >= option.low && x <= option.high) return {};
    std::string expected = range_text(option.low, option.high);
    if (x > option.high && option.high >= 9e15)
      expected = std::isinf(x) ? "a finite number" : "at most " + number_text(option.high);
    return bad_input(op.name + ": " + option.name + " is " + number_text(x) + ", expected " + expected);
  };
  switch (option.kind) {
    case OptionKind::real: return range(value_at<double>(args, option.offset));
    case OptionKind::maybe_real: {
      const Maybe& x = value_at<Maybe>(args, option.offset);
      return x.given ? range(x.value) : Status();
    }
    case OptionKind::integer: return range(static_cast<double>(value_at<int64_t>(args, option.offset)));
    case OptionKind::choice: return range(value_at<int32_t>(args, option.offset));
    case OptionKind::window: {
      const Window& w = value_at<Window>(args, option.offset);
      if (w.left >= -1 && w.right >= -1) return {};
      return bad_input(op.name + ": " + option.name + " is (" + std::to_string(w.left) + ", " + std::to_string(w.right) +
                       "), expected values of at least -1 (-1: unlimited)");
    }
    case OptionKind::sizes: {
      const Sizes& list = value_at<Sizes>(args, option.offset);
      if (list.count < 0 || list.count > Sizes::kMax) {
        return bad_input(op.name + ": " + option.name + " has " + std::to_string(list.count) + " numbers, expected at most " +
                         std::to_string(Sizes::kMax));
      }
      for (int64_t i = 0; i < list.count; ++i) LINNET_TRY(range(static_cast<double>(list.value[i])));
      return {};
    }
    case OptionKind::boolean: break;
  }
  return {};
}

Status set_option(const Op& op, std::string_view name, std::string_view text, void* args) {
  const OptionDecl* option = op.find_option(name);
  if (option == nullptr) return bad_input(op.name + ": there is no option '" + std::string(name) + "'");
  const auto wrong = [&](const std::string& expected) {
    return bad_input(op.name + ": " + option->name + " is '" + std::string(text) + "', expected " + expected);
  };
  const auto parse = [](std::string_view word, auto* value) {
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), *value);
    return error == std::errc() && end == word.data() + word.size() && !word.empty();
  };
  switch (option->kind) {
    case OptionKind::real: {
      double x;
      if (!parse(text, &x)) return wrong("a number");
      value_at<double>(args, option->offset) = x;
      break;
    }
    case OptionKind::maybe_real: {
      double x = 0;
      const bool none = text == "none" || text.empty();
      if (!none && !parse(text, &x)) return wrong("a number or none");
      value_at<Maybe>(args, option->offset) = none ? Maybe() : Maybe(x);
      break;
    }
    case OptionKind::integer: {
      int64_t x;
      if (!parse(text, &x)) return wrong("a whole number");
      value_at<int64_t>(args, option->offset) = x;
      break;
    }
    case OptionKind::boolean: {
      const bool on = text == "1" || text == "true";
      if (!on && text != "0" && text != "false") return wrong("0 or 1");
      value_at<bool>(args, option->offset) = on;
      break;
    }
    case OptionKind::choice: {
      std::string names;
      for (size_t i = 0; i < option->choices.size(); ++i) {
        names += (i ? ", " : "") + option->choices[i];
        if (text != option->choices[i]) continue;
        value_at<int32_t>(args, option->offset) = static_cast<int32_t>(i);
        return {};
      }
      return wrong("one of " + names);
    }
    case OptionKind::window: {
      Window w;
      const size_t comma = text.find(',');
      if (comma == std::string_view::npos || !parse(text.substr(0, comma), &w.left) ||
          !parse(text.substr(comma + 1), &w.right)) {
        return wrong("two whole numbers such as 4,-1");
      }
      value_at<Window>(args, option->offset) = w;
      break;
    }
    case OptionKind::sizes: {
      Sizes list;
      for (std::string_view rest = text == "none" ? "" : text; !rest.empty();) {
        const std::string_view word = rest.substr(0, rest.find(','));
        if (list.count == Sizes::kMax) return wrong("at most " + std::to_string(Sizes::kMax) + " numbers");
        if (!parse(word, &list.value[list.count++])) return wrong("whole numbers such as 2,4,8, or none");
        rest.remove_prefix(word.size() == rest.size() ? word.size() : word.size() + 1);
      }
      value_at<Sizes>(args, option->offset) = list;
      break;
    }
  }
  return check_option(op, *option, args);
}

std::string option_text(const OptionDecl& option, const void* args) {
  switch (option.kind) {
    case OptionKind::real: return number_text(value_at<double>(args, option.offset));
    case OptionKind::maybe_real: {
      const Maybe& x = value_at<Maybe>(args, option.offset);
      return x.given ? number_text(x.value) : "none";
    }
    case OptionKind::integer: return std::to_string(value_at<int64_t>(args, option.offset));
    case OptionKind::boolean: return value_at<bool>(args, option.offset) ? "1" : "0";
    case OptionKind::choice: return option.choices[static_cast<size_t>(value_at<int32_t>(args, option.offset))];
    case OptionKind::window: {
      const Window& w = value_at<Window>(args, option.offset);
      return std::to_string(w.left) + "," + std::to_string(w.right);
    }
    case OptionKind::sizes: {
      const Sizes& list = value_at<Sizes>(args, option.offset);
      std::string text;
      for (int64_t i = 0; i < list.count; ++i) text += (i ? "," : "") + std::to_string(list.value[i]);
      return list.count == 0 ? "none" : text;
    }
  }
  return "";
}

}  // namespace linnet
