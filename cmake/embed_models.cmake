# Turns the configuration files of models/ into a C table, so that the library carries them.
#
#   cmake -DOUTPUT=file.c "-DMODELS=a.json;b.json" -P embed_models.cmake

if(NOT OUTPUT OR NOT MODELS)
  message(FATAL_ERROR "OUTPUT and MODELS must be given")
endif()

set(texts "")
set(rows "")
set(index 0)
list(SORT MODELS)
foreach(model IN LISTS MODELS)
  get_filename_component(name ${model} NAME)
  string(REGEX REPLACE "\\.json$" "" name ${name})
  file(READ ${model} hex HEX)
  string(LENGTH "${hex}" digits)
  math(EXPR bytes "${digits} / 2")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," hex "${hex}")
  # The trailing zero keeps the array from being empty; the size does not include it.
  string(APPEND texts "static const unsigned char text_${index}[] = {${hex}0};\n")
  string(APPEND rows "    {\"${name}\", text_${index}, ${bytes}},\n")
  math(EXPR index "${index} + 1")
endforeach()

file(WRITE ${OUTPUT}.new "/* Generated from models/ by embed_models.cmake. */
#include \"model/config.h\"

${texts}
const kvf_builtin_model kvf_builtin_models[] = {
${rows}    {NULL, NULL, 0},
};
")
file(RENAME ${OUTPUT}.new ${OUTPUT})
