#include <evalrt.h>
