# Writes the linker's version script of the shared library: every function that the public headers declare, under
# one version node. Until 1.0 the node has the soname's version, because a new minor version may break the interface.
#
#   cmake -DOUTPUT=kvferry.map -DNODE=KVFERRY_0.1 "-DHEADERS=a.h;b.h" -P exports.cmake

set(names "")
foreach(header IN LISTS HEADERS)
  file(READ ${header} text)
  string(REPLACE ";" "\n" text "${text}")
  # A declaration begins with KVF_API, and the name stands before the first parenthesis.
  string(REGEX MATCHALL "KVF_API [^()\n]*kvf_[a-z0-9_]+\\(" declarations "${text}")
  foreach(declaration IN LISTS declarations)
    string(REGEX REPLACE ".*(kvf_[a-z0-9_]+)\\(" "\\1" name "${declaration}")
    list(APPEND names ${name})
  endforeach()
endforeach()
list(SORT names)

list(JOIN names ";\n        " text)
file(WRITE ${OUTPUT} "${NODE} {\n    global:\n        ${text};\n    local:\n        *;\n};\n")
