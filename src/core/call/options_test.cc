// Options from text and back.
#include <gtest/gtest.h>

#include "core/call/toy.h"

namespace linnet {
namespace {

TEST(OpOptions, FromTextAndBack) {
  const struct {
    const char *option, *text, *back;  // back: as printed, or the sentence
    bool ok;
  } table[] = {
      {"scale", "0.25", "0.25", true},
      {"scale", "none", "none", true},
      {"scale", "-8", "-8", true},
      {"scale", "8.5", "toy: scale is 8.5, expected -8 to 8", false},
      {"scale", "1x", "toy: scale is '1x', expected a number or none", false},
      {"causal", "1", "1", true},
      {"causal", "true", "1", true},
      {"causal", "yes", "toy: causal is 'yes', expected 0 or 1", false},
      {"window", "4,-1", "4,-1", true},
      {"window", "4", "toy: window is '4', expected two whole numbers such as 4,-1", false},
      {"window", "4,-2", "toy: window is (4, -2), expected values of at least -1 (-1: unlimited)", false},
      {"rolls", "4", "4", true},
      {"rolls", "4.0", "toy: rolls is '4.0', expected a whole number", false},
      {"rolls", "", "toy: rolls is '', expected a whole number", false},
      {"cap", "1e-3", "0.001", true},
      {"cap", "nan", "toy: cap is nan, expected at least 0", false},
      {"cap", "inf", "toy: cap is inf, expected a finite number", false},
      {"width", "wide", "wide", true},
      {"width", "1", "toy: width is '1', expected one of same, wide, counted", false},
      {"height", "1", "toy: there is no option 'height'", false},
  };
  for (const auto& row : table) {
    Toy toy;
    const Status status = toy.set(row.option, row.text);
    EXPECT_EQ(status.ok(), row.ok) << row.option << "=" << row.text;
    const OptionDecl* option = toy_op().find_option(row.option);
    EXPECT_EQ(row.ok ? option_text(*option, &toy.args) : status.message(), row.back);
  }
}

}  // namespace
}  // namespace linnet
