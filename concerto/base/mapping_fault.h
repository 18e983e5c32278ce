// A mapped file that is cut short, or whose disk fails, while it is read does not give an error code: the system sends
// SIGBUS. This turns that into a message which names the file.
#pragma once

#include <cstddef>
#include <string>

namespace concerto {

// From now on SIGBUS inside a file of a MappedFile prints an error of the usual form on standard error and ends the
// process with the code of ErrorCode::kIo. Any other SIGBUS stays what it was.
void explain_mapping_faults();

// Called by MappedFile; thread-safe. Of some hundreds of files at once; more are fine, but then not named.
void note_mapping(const void* begin, size_t bytes, const std::string& path);
void forget_mapping(const void* begin);

}  // namespace concerto
