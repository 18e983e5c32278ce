// The program: one subcommand a file. Errors end with their exit code and say what, where and how to mend it
// (docs/errors.md).
#include "concerto/base/mapping_fault.h"
#include "concerto/cli/program.h"

int main(int argc, char** argv) {
  concerto::hold_standard_streams();
  concerto::explain_mapping_faults();
  return concerto::run_program(argc, argv);
}
