-- Stores constants as the profile's next version and points at it.
-- ARGV: prefix, profile, version expected to be current ('0' for none), then field, value, ...
-- Returns the version (0 where another one is current) and the time of publishing.
local prefix, profile = ARGV[1], ARGV[2]
local pointer = prefix .. 'constants:' .. profile
if (redis.call('HGET', pointer, 'version') or '0') ~= ARGV[3] then
  return {0, '0'}
end
local time = redis.call('TIME')
local unix = string.format('%d.%06d', time[1], time[2])
local version = redis.call('HINCRBY', pointer, 'latest', 1)
local fields = {}
for i = 4, #ARGV do
  fields[#fields + 1] = ARGV[i]
end
redis.call('HSET', pointer .. ':' .. version, 'version', version, 'published_unix', unix,
  unpack(fields))
redis.call('HSET', pointer, 'version', version, 'changed_unix', unix)
redis.call('SADD', prefix .. 'constants', profile)
redis.call('INCR', prefix .. 'generation')
return {version, unix}
