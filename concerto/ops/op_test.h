// How ops are tested. An op's test is a body that asks an OpRun for its arguments by values and calls the op;
// `check_op` plays it
//   - dry, with null views on a counting arena: gives the scratch that the real run must take, to the byte;
//   - on the backend under test, several thread counts, each twice: scratch poisoned with NaN, outputs filled with NaN,
//     gaps between strided rows and all inputs must stay as they were, the second run must give the same bits;
//   - on ref in f64 with the same (rounded) values: the truth.
// Tolerance of an element: rounding of the output, plus (4 + sqrt(length)) roundings of the stat type on the norm of
// its sum.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "concerto/base/rng.h"
#include "concerto/ops/backend.h"

namespace concerto::test {

using Values = std::vector<double>;

struct BackendCase {
  std::string backend;
  DType type;
};
std::ostream& operator<<(std::ostream& out, const BackendCase& c);
std::vector<BackendCase> backend_cases();  // every built backend with each of its compute types
const Backend& find_backend(const std::string& name);
std::string case_name(const testing::TestParamInfo<BackendCase>& info);

// Types relative to the run's compute type.
enum class Kind { kCompute, kStat, kI32, kI64, kF64 };

// What the error of an output is measured by.
struct Bound {
  int64_t length = 1;          // of its longest sum
  double norm = 0;             // bound of the sum of |terms|; 0: the largest |truth|
  bool rounds_inside = false;  // intermediate values may be rounded to the compute type (attention)
  bool compared = true;        // false: read only by the test
};

class OpRun {
 public:
  OpRun(const Backend& backend, DType type, DType round_as, int threads, int64_t scratch_bytes);  // scratch < 0: dry

  // Values are rounded to the type they have in the run under test. `gap`: elements between the end of a row and the
  // next row.
  View in(Kind kind, Shape shape, const Values& values, int64_t gap = 0);
  View out(const std::string& name, Kind kind, Shape shape, Bound bound = {}, int64_t gap = 0);
  View inout(const std::string& name, Kind kind, Shape shape, const Values& start, Bound bound = {}, int64_t gap = 0);

  const Context& context() const { return context_; }
  bool dry() const { return context_.dry_run; }
  DType type() const { return type_; }
  DType type_of(Kind kind) const;

  struct Output {
    Values values;
    Bound bound;
    DType type;
  };
  // After the body: checks inputs and gaps, gives the outputs.
  std::map<std::string, Output> finish();
  int64_t scratch_used() const { return arena_.high_water(); }

 private:
  struct Held {
    std::string name;
    View view;
    Bound bound;
    std::vector<char> memory, before;
  };
  View hold(const std::string& name, Kind kind, Shape shape, const Values* values, Bound bound, int64_t gap);

  DType type_, round_as_;
  Arena arena_;
  Context context_;
  std::deque<Held> held_;
};

using Body = std::function<void(OpRun&)>;
using Outputs = std::map<std::string, OpRun::Output>;

// One run with scratch measured by a dry run. Values are rounded as for compute type `round_as`.
Outputs run_op(const Backend& backend, DType type, DType round_as, int threads, const Body& body);
// The whole list above; `threads_agree`: outputs must have the same bits for every number of threads.
void check_op(const BackendCase& c, const Body& body, bool threads_agree = false);

// f64 on ref, for finite differences.
Outputs run_f64(const Body& body);
Values output_f64(const Body& body, const std::string& name);
// gradient[i] against (f(x + h e_i) - f(x - h e_i)) / 2h for every i.
void check_gradient(const char* what, Values x, const Values& gradient, const std::function<double(const Values&)>& f);

double unit_roundoff(DType type);
double round_to(DType type, double value);
Values rounded(Values values, DType type);
Values normal(const char* name, int64_t n, double scale = 1);
Values integers(std::initializer_list<int64_t> list);
Values minus(const Values& a, const Values& b);
double dot(const Values& a, const Values& b);
double largest(const Values& v);
double largest_row_norm(const Values& v, int64_t cols);
bool same_bits(const Values& a, const Values& b);
Values slice(const Values& v, int64_t begin, int64_t count);

class OpTest : public testing::TestWithParam<BackendCase> {
 protected:
  const Backend& backend() const { return find_backend(GetParam().backend); }
  DType type() const { return GetParam().type; }
  DType stat() const { return stat_dtype(GetParam().type); }
};

}  // namespace concerto::test

// Runs the TEST_P cases of a suite on every backend and compute type.
#define CONCERTO_ON_EVERY_BACKEND(suite)                                                          \
  INSTANTIATE_TEST_SUITE_P(Backends, suite, testing::ValuesIn(::concerto::test::backend_cases()), \
                           ::concerto::test::case_name)
