-- Stores reports of the registered epochs as of now; returns the positions (from 0) of the others.
-- ARGV: prefix, TTL of the readable hash in ms, number of reports, then for each of them:
--   instance id, epoch, the report as JSON, number n, and n times field, value
local prefix, ttl, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local score, unix = string.format('%.0f', now), string.format('%.3f', now / 1000)
local rejected, at = {}, 4
for number = 0, count - 1 do
  local id, epoch, json, pairs_ = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  at = at + 4
  local member = redis.call('HMGET', prefix .. 'member:' .. id,
    'epoch', 'state', 'role', 'model', 'address', 'kv_total_tokens')
  if member[1] == epoch then
    redis.call('HSET', prefix .. 'loads', id, json)
    redis.call('ZADD', prefix .. 'last_seen', score, id)
    local fields = {}
    for i = at, at + 2 * pairs_ - 1 do
      fields[#fields + 1] = ARGV[i]
    end
    local key = prefix .. 'instance:' .. id
    redis.call('HSET', key, 'epoch', epoch, 'state', member[2], 'role', member[3],
      'model', member[4], 'address', member[5], 'kv_total_tokens', member[6],
      'last_report_unix', unix, unpack(fields))
    redis.call('PEXPIRE', key, ttl)
  else
    rejected[#rejected + 1] = number
  end
  at = at + 2 * pairs_
end
return rejected
