// Drawing: the inputs of a case, drawn from its seed. Every tensor has its own random stream, so that a case keeps its other
// values when one is left out.
//
//   Problem problem;
//   Drawing drawing(c, &problem);
//   LINNET_TRY(drawing.outline());   // shapes, integers, and whether the operator takes the call
//   drawing.fill();                  // floats
//   LINNET_TRY(drawing.results());   // what is computed, and the incoming gradients
#pragma once

#include <string>
#include <vector>

#include "check/problem.h"

namespace linnet::check {

class Random;

class Drawing {
 public:
  Drawing(const Case& c, Problem* problem) : c_(c), op_(*c.op), call_(*c.op), problem_(problem) {}

  // The inputs' shapes and integers; refused calls end here.
  Status outline();
  void fill();       // the floats, rounded to their types
  Status results();  // what is computed, and the incoming gradients

  const Call& call() const { return call_; }

 private:
  std::vector<std::string> shape_words(const TensorDecl& decl) const;
  const Array* find(std::string_view name) const { return find_array(problem_->inputs, name); }
  Status add(const TensorDecl& decl);
  void draw_index(const TensorDecl& decl, Array* array);
  // Every node but the root takes a run of the nodes that have no parent yet; the root takes the rest. Runs keep subtrees over
  // consecutive leaves together; "mixed" shuffles the leaves first.
  void draw_tree(int64_t leaves, Random& random, std::vector<double>* parent) const;
  // The rows of a paged cache that its lengths use: page_table [B, pages] and lengths [B] of pages*page.
  struct Paging {
    const Array* table = nullptr;
    const Array* lengths = nullptr;
    std::string page, P;
  };
  Paging paging(const TensorDecl& table) const;
  // Entries past the last used page may hold anything.
  void spoil_page_table(const TensorDecl& decl);
  Status prepare();
  void draw(const TensorDecl& decl, Array* array);
  // All tokens are one token, whose numbers are made positive: a result that hangs on its one score q.k would otherwise carry
  // the conditioning of that dot product, which no kernel can mend.
  void repeat_tokens(const TensorDecl& decl, Array* array) const;
  // NaN in all that the operator must not read: keys past a length, before a start, under a mask, rows of no page.
  void spoil(const TensorDecl& decl, Array* array) const;

  const Case& c_;
  const Op& op_;
  Call call_;
  Dims dims_;
  Problem* problem_;
  bool drop_batch_ = false;
  std::vector<std::vector<int64_t>> integers_;  // the prepared call reads them: its cost depends on lengths
};

}  // namespace linnet::check
