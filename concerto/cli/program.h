// The program without its process, so that tests can run it.
#pragma once

namespace concerto {

// Opens what the caller closed of the standard streams. Else the next file gets the number, and a run's progress is
// written into its metrics.
void hold_standard_streams();

// Runs the command that the arguments name and returns the exit code (docs/errors.md). What goes wrong is said on
// standard error, and with --json also as one object on standard output. Throws nothing.
int run_program(int argc, const char* const* argv);

}  // namespace concerto
