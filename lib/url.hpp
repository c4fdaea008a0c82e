// What two addresses have in common.
#ifndef EVALRT_LIB_URL_HPP
#define EVALRT_LIB_URL_HPP

#include <string>
#include <string_view>

namespace evalrt::detail {

/// The same text for the same address: with its port, its host in small letters, this machine's one
/// name for all that it has for itself, without a slash at the end. As it is, if it is no URL.
std::string plain_address(std::string_view url);

/// Whether each address of this list, with spaces between, is in the other one; an empty one is
/// not.
bool addresses_in(std::string_view some, std::string_view others);

/// The first list, and behind it what only the second one has.
std::string joined_addresses(std::string_view some, std::string_view others);

} // namespace evalrt::detail

#endif
