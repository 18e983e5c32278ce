// How a command ends when it is a job of many processes that ended it.
#pragma once

#include "concerto/base/error.h"

namespace concerto {

// An error whose command ends with another exit code than its kind's: the failed rank's.
struct JobError : Error {
  JobError(const Error& error, int code) : Error(error), exit_code(code) {}
  int exit_code;
};

// The command ends with this code and says nothing: another rank has told why.
struct QuietEnd {
  int exit_code;
};

}  // namespace concerto
