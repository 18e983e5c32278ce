#include "concerto/checkpoint/rank_reports.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace concerto {
namespace {

using nlohmann::json;

constexpr char kGood = '+', kBad = '-';
constexpr double kFilesSeconds = 3600;  // how long a rank may read or write before the others take it for hung

std::string error_text(const Error& e) {
  const json text{{"code", static_cast<int>(e.code)}, {"where", e.where}, {"what", e.problem}, {"fix", e.fix}};
  return text.dump(-1, ' ', false, json::error_handler_t::replace);  // a path need not be UTF-8
}

Error parse_error(const std::string& text) {
  const json e = json::parse(text);
  return Error(static_cast<ErrorCode>(e["code"].get<int>()), e["where"], e["what"], e["fix"]);
}

}  // namespace

RankReports::Report RankReports::attempt(const Work& work) const {
  Report report;
  try {
    report.text = work();
  } catch (const Error& e) {
    report.error = e;
    report.thrown = std::current_exception();
  } catch (const std::exception& e) {
    report.error = Error(ErrorCode::kIo, fmt::format("rank {}", rank()), e.what());
    report.thrown = std::current_exception();
  }
  return report;
}

void RankReports::send(const Report& report, int to) const {
  std::string wire = report.error ? kBad + error_text(*report.error) : kGood + report.text;
  auto bytes = static_cast<int64_t>(wire.size());
  world_->send(View(&bytes, Shape{1}, DType::kI64), to);
  world_->send(View(wire.data(), Shape{bytes}, DType::kU8), to);
}

RankReports::Report RankReports::receive(int from) const {
  int64_t bytes = 0;
  world_->recv(View(&bytes, Shape{1}, DType::kI64), from);
  std::string wire(static_cast<size_t>(bytes), '\0');
  world_->recv(View(wire.data(), Shape{bytes}, DType::kU8), from);
  CHECK(!wire.empty());
  Report report;
  if (wire[0] == kBad)
    report.error = parse_error(wire.substr(1));
  else
    report.text = wire.substr(1);
  return report;
}

std::optional<Error> RankReports::first_error(const std::vector<Report>& reports) const {
  const auto first = std::find_if(reports.begin(), reports.end(), [](const Report& r) { return r.error.has_value(); });
  if (first == reports.end()) return std::nullopt;
  const Error& e = *first->error;
  const bool of_all = std::all_of(reports.begin(), reports.end(), [&](const Report& r) {
    return r.error && std::string_view(r.error->what()) == e.what();
  });
  const auto from = static_cast<int>(first - reports.begin());
  if (of_all || e.where == fmt::format("rank {}", from)) return e;
  return Error(e.code, fmt::format("rank {}: {}", from, e.where), e.problem, e.fix);
}

std::string RankReports::end_with(const Report& own, const Report& verdict) const {
  if (!verdict.error) return verdict.text;
  if (own.thrown) try {
      std::rethrow_exception(own.thrown);
    } catch (const Error&) {  // all throw the same one, below
    }
  throw *verdict.error;
}

std::string RankReports::agree(const Work& work, const Decide& decide) const {
  const CommPatience patience(kFilesSeconds);
  std::vector<Report> reports;
  reports.push_back(attempt(work));
  if (rank() > 0) {
    send(reports[0], 0);
    return end_with(reports[0], receive(0));
  }
  for (int from = 1; from < size(); ++from) reports.push_back(receive(from));
  Report verdict;
  verdict.error = first_error(reports);
  Report own = reports[0];
  if (!verdict.error && decide) {
    std::vector<std::string> texts;
    for (Report& report : reports) texts.push_back(std::move(report.text));
    verdict = own = attempt([&] { return decide(texts); });
  }
  for (int to = 1; to < size(); ++to) send(verdict, to);
  return end_with(own, verdict);
}

std::string RankReports::announce(const Work& work) const {
  const CommPatience patience(kFilesSeconds);
  if (rank() > 0) return end_with({}, receive(0));
  const Report verdict = attempt(work);
  for (int to = 1; to < size(); ++to) send(verdict, to);
  return end_with(verdict, verdict);
}

std::vector<int> deal(const std::vector<int64_t>& bytes, int ranks) {
  double all = 0, before = 0;
  for (const int64_t b : bytes) all += static_cast<double>(b);
  std::vector<int> owners;
  for (const int64_t b : bytes) {
    const double middle = (before + static_cast<double>(b) / 2) / std::max(all, 1.0);
    owners.push_back(std::min(ranks - 1, static_cast<int>(middle * ranks)));
    before += static_cast<double>(b);
  }
  return owners;
}

}  // namespace concerto
