// All of evalrt.
#ifndef EVALRT_EVALRT_HPP
#define EVALRT_EVALRT_HPP

#include "evalrt/backend.hpp"
#include "evalrt/backend_row.hpp"
#include "evalrt/error.hpp"
#include "evalrt/gateway.hpp"
#include "evalrt/http_backend.hpp"
#include "evalrt/journal.hpp"
#include "evalrt/prefix_planner.hpp"
#include "evalrt/report.hpp"
#include "evalrt/request.hpp"
#include "evalrt/request_scheduler.hpp"
#include "evalrt/runtime.hpp"
#include "evalrt/server_process.hpp"

#endif
